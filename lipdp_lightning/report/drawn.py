"""Turns a plot into a part of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from lipdp_lightning.report.figure_style import figure_to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drawn"]


@dataclass(frozen=True)
class Drawn:
    """A plot as markup, with its caption; ``kind`` is a class of the style sheet."""

    svg: Markup
    caption: str
    kind: str = ""

    @classmethod
    def of(cls, figure: Figure, name: str, alt: str, caption: str, kind: str = "") -> Drawn:
        """Returns a figure of matplotlib as inline SVG, in which names are escaped."""
        return cls(Markup(figure_to_svg(figure, name=name, alt=alt)), caption, kind)
