"""Updates docs/performance.md: its prose stays, and the text between two markers is replaced by measurements.

<!-- bench: NAME -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.comparison_files import markdown_table, measured_by
from ..bench.comparison_plots import write_png
from ..bench.step_counts import count, memory_lines
from .growth import HEADERS, SERIES, Law, figure_of, lines

_SECTION = re.compile(r"^<!-- bench: (\w+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
SECTIONS = ("steps", "growth", "memory", "estimate")
COUNTED = ("convnet-1.6m", "mlp-table", "scattering-head", "wrn-16-4", "wrn-40-4")
BATCHES = (256, 1024, 4096)
ESTIMATED = (("wrn-16-4", 4096, (8,), 16), ("convnet-1.6m", 1024, (1,), 1))


def sections_of(page: str) -> list[str]:
    return [match.group(1) for match in _SECTION.finditer(page)]


def replaced(page: str, contents: Mapping[str, str]) -> str:
    """Returns the page with the named sections replaced; a section that the page lacks raises ValueError."""
    missing = sorted(set(contents) - set(sections_of(page)))
    if missing:
        raise ValueError(
            f"the page has no section {', '.join(missing)}. HINT: <!-- bench: {missing[0]} --> and <!-- end -->."
        )

    def content(match: re.Match[str]) -> str:
        name = match.group(1)
        text = contents[name].strip() + "\n" if name in contents else match.group(2)
        return f"<!-- bench: {name} -->\n{text}<!-- end -->"

    return _SECTION.sub(content, page)


def update(page: Path, contents: Mapping[str, str]) -> None:
    from ..report.atomic import write_atomically

    write_atomically(page, replaced(page.read_text(encoding="utf-8"), contents))


def growth_section(laws: Sequence[Law], figures: Path, prefix: str, machine: dict[str, Any]) -> str:
    """Returns the table of exponents, and a plot of each series."""
    figures.mkdir(parents=True, exist_ok=True)
    text = [markdown_table(HEADERS, lines(laws))]
    for series in SERIES:
        if any(law.series == series.name for law in laws):
            write_png(figures / f"growth-{series.name}.png", figure_of(laws, series))
            text.append(f"![growth with {series.name}]({prefix}growth-{series.name}.png)\n")
    return "\n".join([*text, measured_by(machine)])


def memory_section() -> str:
    return markdown_table(*memory_lines([count(name) for name in COUNTED], BATCHES))


def estimate_section() -> str:
    from .gpu_estimate import markdown

    return "\n".join(markdown(*one) for one in ESTIMATED)
