"""Writes the audit as one HTML page that loads nothing, as JSON, and as lines for the terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from ..bound_text import lower_text, upper_text
from ..extras import is_installed
from ..report.atomic import write_all_atomically
from ..report.drawn import Drawn
from ..report.formats import format_bound
from ..report.pages import render_page
from ..report.tables import render_table
from .finding_plots import describe, draw
from .findings import Finding
from .suite import AuditReport

HTML_NAME, JSON_NAME = "audit.html", "audit.json"


def write_audit(directory: str | Path, report: AuditReport) -> dict[str, Path]:
    """Writes ``audit.html`` and ``audit.json``; both are rendered before either is written."""
    return write_all_atomically(directory, {HTML_NAME: render_audit(report), JSON_NAME: audit_json(report)})


def audit_json(report: AuditReport) -> str:
    return json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n"


def headline(report: AuditReport) -> str:
    if report.violations:
        worst = max(report.violations, key=lambda f: f.factor if f.factor and math.isfinite(f.factor) else 0.0)
        names = ", ".join(f.name for f in report.violations)
        factor = "" if worst.factor is None else f"; the largest measured factor is {worst.factor:.4g} ({worst.name})"
        return f"{len(report.violations)} of {len(report.findings)} checks are violated: {names}{factor}."
    return (
        f"No violation in {len(report.findings)} checks. An audit can refute a guarantee and never prove one; "
        f"the claim is epsilon {format_bound(report.claimed_epsilon)} at delta {format_bound(report.plan.delta)}."
    )


def terminal_text(report: AuditReport) -> str:
    rows = [[f.name, f.verdict, _number(f.factor), *_epsilons(f)] for f in report.findings]
    heads = ["check", "verdict", "measured/claimed", "epsilon >=", "claimed"]
    lines = [render_table(heads, rows, right=[False, False, True, True, True]), ""]
    lines += [f"{f.name}: {f.statement}" for f in report.violations]
    return "\n".join([*lines, headline(report)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _epsilons(finding: Finding) -> tuple[str, str]:
    """Returns the bound that was shown, rounded down, and the one that is claimed, rounded up."""
    lower, claimed = finding.epsilon_lower, finding.epsilon_claimed
    return "-" if lower is None else lower_text(lower), "-" if claimed is None else upper_text(claimed)


def render_audit(report: AuditReport) -> str:
    """Returns the page of an audit."""
    return render_page(
        "audit.html",
        report=report,
        claim=format_bound(report.claimed_epsilon),
        delta=format_bound(report.plan.delta),
        headline=headline(report),
        json_name=JSON_NAME,
        findings=[
            {
                "finding": finding,
                "numbers": (_number(finding.factor), *_epsilons(finding), _number(finding.p_value)),
                "plots": list(_plots(finding, number)),
            }
            for number, finding in enumerate(report.findings)
        ],
    )


def _plots(finding: Finding, number: int) -> Iterator[Drawn]:
    for index, plot in enumerate(finding.plots if is_installed("matplotlib") else ()):
        name = re.sub(r"\W+", "-", f"{finding.name}-{number}-{index}")
        yield Drawn.of(draw(plot), name, describe(plot), plot.caption)
