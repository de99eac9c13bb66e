"""Writes the figures of an entry, and lists them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Output:
    """The folder of an entry's files. Figures are made with `lipdp_lightning.report.figure_style.new_figure`."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.figures: list[tuple[str, str]] = []

    def path(self, suffix: str) -> Path:
        """Returns `<directory>/<name><suffix>`."""
        return self.directory / f"{self.name}{suffix}"

    def figure(self, figure: Figure, alt: str, part: str = "") -> None:
        """Writes the figure as PNG and SVG; `part` tells several of one entry apart, `alt` describes it in words."""
        import matplotlib

        from lipdp_lightning.files import write_bytes_atomically
        from lipdp_lightning.report.atomic import write_atomically
        from lipdp_lightning.report.figure_style import figure_to_png

        suffix = f"-{part}" if part else ""
        picture = self.path(f"{suffix}.png")
        write_bytes_atomically(picture, figure_to_png(figure))
        drawing = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            figure.savefig(drawing, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
        write_atomically(self.path(f"{suffix}.svg"), drawing.getvalue())
        self.figures.append((picture.name, alt))
