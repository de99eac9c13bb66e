"""Writes the audit as one HTML page that loads nothing, as JSON, and as lines for the terminal."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

from ..bound_text import lower_text, upper_text
from ..report.atomic import write_all_atomically
from ..report.figure_style import figure_to_svg
from ..report.formats import clean_text, format_bound
from ..report.page_style import STYLE
from ..report.tables import render_table
from .finding_plots import describe, draw
from .findings import Finding
from .suite import AuditReport

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
HTML_NAME, JSON_NAME = "audit.html", "audit.json"
_BADGES = {"pass": ("good", "pass"), "violation": ("bad", "VIOLATION"), "information": ("warn", "information")}


def write_audit(directory: str | Path, report: AuditReport) -> dict[str, Path]:
    """Writes ``audit.html`` and ``audit.json``; both are rendered before either is written."""
    return write_all_atomically(directory, {HTML_NAME: render_page(report), JSON_NAME: audit_json(report)})


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


def _text(value: object) -> str:
    return html.escape(clean_text(value), quote=True)


def render_page(report: AuditReport) -> str:
    bad = bool(report.violations)
    badge = _badge("violation" if bad else "pass")
    uncertified = (
        ""
        if report.plan.certified
        else '<p class="caution" role="note"><strong>Caution.</strong> This configuration has no guarantee; it is '
        "audited against the epsilon that its noise multiplier would stand for.</p>"
    )
    claim = format_bound(report.claimed_epsilon)
    body = [
        f'<header><p class="eyebrow">Privacy audit, {_text(report.suite)} suite</p>'
        f"<h1>{_text(report.title)}</h1></header>",
        f'<section class="card hero{" bad" if bad else ""}" aria-label="Verdict"><div class="facts">',
        _fact("verdict", "violated" if bad else "not refuted", ""),
        _fact("claimed epsilon", claim, f"at delta {format_bound(report.plan.delta)}, {report.plan.adjacency}"),
        _fact("confidence of the suite", f"{100 * report.confidence:.6g} %", "no false alarm, split over its tests"),
        f'</div><div class="meaning wide"><p>{badge} {_text(headline(report))}</p></div></section>',
        uncertified,
        f"<section><h2>Checks</h2>{_table(report)}</section>",
        *(_section(finding, number) for number, finding in enumerate(report.findings)),
        f"<footer><p>Seed {report.seed}. The same as data, with every p-value: {JSON_NAME}. Examples are made up, "
        "except where membership inference is named; that section is not private.</p></footer>",
    ]
    style = STYLE + ".badge { white-space: nowrap; }"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{'VIOLATION: ' if bad else ''}{_text(report.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _fact(label: str, value: str, detail: str) -> str:
    return (
        f'<div class="fact"><p class="label">{_text(label)}</p><p class="value">{_text(value)}</p>'
        f'<p class="detail">{_text(detail)}</p></div>'
    )


def _badge(verdict: str) -> str:
    kind, word = _BADGES[verdict]
    return f'<span class="badge {kind}">{word}</span>'


def _table(report: AuditReport) -> str:
    heads = ("check", "question", "verdict", "measured / claimed", "epsilon ≥", "claimed", "p-value")
    rows = []
    for finding in report.findings:
        numbers = (_number(finding.factor), *_epsilons(finding), _number(finding.p_value))
        cells = "".join(f'<td class="number">{_text(n)}</td>' for n in numbers)
        rows.append(
            f'<tr><th scope="row">{_text(finding.name)}</th><td>{_text(finding.question)}</td>'
            f"<td>{_badge(finding.verdict)}</td>{cells}</tr>"
        )
    head = "".join(f'<th scope="col"{" class=number" if i > 2 else ""}>{h}</th>' for i, h in enumerate(heads))
    return (
        '<div class="card"><div class="scroll" role="region" tabindex="0" aria-label="Checks"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _section(finding: Finding, number: int) -> str:
    level = ""
    if finding.alpha is not None:
        level = f'<p class="when">Fails for a correct program with probability at most {finding.alpha:.2g}.</p>'
    plots = []
    for index, plot in enumerate(finding.plots):
        name = re.sub(r"\W+", "-", f"{finding.name}-{number}-{index}")
        svg = figure_to_svg(draw(plot), name=name, alt=describe(plot))
        plots.append(f'<figure class="card">{svg}<figcaption>{_text(plot.caption)}</figcaption></figure>')
    shown = f'<div class="grid plots">{"".join(plots)}</div>' if plots else ""
    return (
        f"<section><h2>{_text(finding.question)}</h2><p>{_badge(finding.verdict)} "
        f"<strong>{_text(finding.name)}.</strong> {_text(finding.statement)}</p>{level}{shown}</section>"
    )
