"""Renders ``report.html``, one file with its style and plots inside, which loads nothing and runs nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from lipdp_lightning.report.calibration_summary import calibration_words, result_table
from lipdp_lightning.report.contents import (
    Table,
    layer_table,
    ledger_table,
    metric_table,
    plan_facts_table,
    release_table,
    version_table,
)
from lipdp_lightning.report.figure_style import figure_to_svg
from lipdp_lightning.report.formats import clean_lines, clean_text, format_bound, format_number
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.page_style import STYLE
from lipdp_lightning.report.plots import LAYER_PLOTS, TRAINING_PLOTS, Plot, epsilon_against_steps
from lipdp_lightning.report.plots_calibration import calibration_alt, calibration_figures
from lipdp_lightning.report.render_markdown import CONFIG_NOTE
from lipdp_lightning.report.words import (
    NO_GUARANTEE,
    adjacency_words,
    cautions,
    find_primary_metric,
    format_metric,
    guarantee_sentence,
    guess_bound,
    is_doubtful,
    metric_label,
    percent_at_most,
    source_words,
)

__all__ = ["render_html"]

CALIBRATION_CAPTIONS = {
    "reliability": "Bars below the diagonal: more confident than right. Pale bars stand for fewer than 20 rows.",
    "positives": "How often class 1 was true where this probability of it was predicted.",
    "classes": "The same for the predicted probability of each class by itself.",
    "coverage": "Points below the diagonal: intervals that are too narrow.",
}
# If a string slips through the escaping, the browser still refuses to load or run anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _text(value: Any) -> str:
    return html.escape(clean_text(value), quote=True)


def _table(table: Table, *, label: str, kind: str = "") -> str:
    def cell(tag: str, text: str, numeric: bool, scope: str = "") -> str:
        style = ' class="number"' if numeric else ""
        return f"<{tag}{scope}{style}>{_text(text)}</{tag}>"

    heads = zip(table.headers, table.numeric, strict=True)
    head = "".join(cell("th", text, numeric, ' scope="col"') for text, numeric in heads)
    lines = []
    for row in table.rows:
        cells = [cell("th", row[0], table.numeric[0], ' scope="row"')]
        cells += [cell("td", text, numeric) for text, numeric in zip(row[1:], table.numeric[1:], strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(label)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _fact(label: str, value: str, detail: str) -> str:
    return (
        f'<div class="fact"><p class="label">{_text(label)}</p><p class="value">{_text(value)}</p>'
        f'<p class="detail">{_text(detail)}</p></div>'
    )


def _steps_fact(facts: RunFacts) -> str:
    label = "of the planned steps taken" if facts.stopped_early else "steps, as planned"
    share = 100 * facts.steps_taken / max(facts.steps_planned, 1)
    value = f"{share:.3g} %" if facts.stopped_early else f"{facts.steps_taken:,}".replace(",", "\u202f")
    detail = f"{facts.steps_taken} of {facts.steps_planned} steps, " if facts.stopped_early else ""
    detail += f"{format_number(facts.expected_batch_size)} of {facts.dataset_size} {facts.unit}s expected per step"
    return _fact(label, value, detail)


def _metric_fact(facts: RunFacts) -> str:
    metric = find_primary_metric(facts)
    if metric is None or metric not in facts.metrics:
        return _fact("accuracy", "none", "no validation was run")
    value = format_metric(metric, facts.metrics[metric])
    return _fact(metric_label(metric), value, f"on {source_words(facts, metric)}")


def _meter(facts: RunFacts) -> str:
    """Returns a bar for the layman's number: how often a bet on one record can be won, between 50 and 100 percent."""
    assert facts.epsilon is not None and facts.delta is not None
    bound = guess_bound(facts.epsilon, facts.delta)
    width = max(0.0, min(100.0, 200 * (bound - 0.5)))
    return (
        '<div class="meter" aria-hidden="true"><strong>'
        f"Best possible bet on one record: {percent_at_most(bound)}</strong>"
        f'<div class="track"><div class="fill" style="width: {width:.1f}%"></div></div>'
        '<div class="ends"><span>50 %, a coin</span><span>100 %, no privacy</span></div></div>'
    )


def _hero(facts: RunFacts) -> str:
    sentence = f"<p>{_text(guarantee_sentence(facts))}</p>"
    if not facts.certified:
        badge = '<span class="badge bad">✕ certified: false</span>'
        loud = f'<div class="fact"><p class="loud">NOT PRIVATE</p>{badge}</div>'
        return (
            f'<section class="card hero bad" aria-label="{NO_GUARANTEE}"><div class="facts">{loud}'
            f"{_metric_fact(facts)}{_steps_fact(facts)}</div>"
            f'<div class="meaning wide">{sentence}</div></section>'
        )
    badge = '<p><span class="badge good">✓ certified: true</span></p>'
    kind = "hero"
    if is_doubtful(facts):
        kind = "hero warn"
        badge = '<p><span class="badge warn">certified: true, but see the caution</span></p>'
    label = "epsilon, the privacy guarantee"
    detail = f"at delta = {format_bound(facts.delta)}, for {adjacency_words(facts)}"
    epsilon = _fact(label, format_bound(facts.epsilon), detail).removesuffix("</div>") + badge + "</div>"
    return (
        f'<section class="card {kind}" aria-label="Headline"><div class="facts">'
        f"{epsilon}{_metric_fact(facts)}{_steps_fact(facts)}</div>"
        f'<div class="meaning">{sentence}{_meter(facts)}</div></section>'
    )


def _figure(plot: Plot, facts: RunFacts) -> str:
    figure = plot.draw(facts)
    if figure is None:
        return ""
    svg = figure_to_svg(figure, name=plot.name, alt=plot.alt(facts))
    return f'<figure class="card">{svg}<figcaption>{_text(plot.caption_for(facts))}</figcaption></figure>'


def _calibration(facts: RunFacts) -> str:
    """Returns diagrams and tables of every evaluation that measured calibration."""
    parts = []
    for result in facts.calibration:
        stage = result["stage"]
        figures = {
            n: f"{figure_to_svg(f, name=f'calibration-{stage}-{n}', alt=calibration_alt(n, result))}"
            f"<figcaption>{_text(CALIBRATION_CAPTIONS[n])}</figcaption></figure>"
            for n, f in calibration_figures(result).items()
        }
        wide = figures.pop("classes", "")
        small = "".join(f'<figure class="card">{figure}' for figure in figures.values())
        words = f'<div class="card"><p>{_text(calibration_words(result, facts.certified))}</p>'
        table = _table(result_table(result), label=f"Calibration, {stage} rows")
        body = f'{words}{table}</div><div class="grid plots" style="margin-top:1.1rem">{small}</div>'
        if wide:
            body += f'<figure class="card" style="margin:1.1rem 0 0; max-width:56rem">{wide}'
        parts.append(_section(f"Calibration, {stage} rows", body))
    return "".join(parts)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _table_card(table: Table, label: str, otherwise: str = "", kind: str = "") -> str:
    if not table:
        return f'<div class="card"><p>{_text(otherwise)}</p></div>' if otherwise else ""
    return f'<div class="card">{_table(table, label=label, kind=kind)}</div>'


def _details(title: str, body: str) -> str:
    return f'<details class="card"><summary>{_text(title)}</summary>{body}</details>'


def _folded(facts: RunFacts) -> str:
    parts = []
    if facts.config:
        # line breaks stay: this is the only text of several lines
        config = "\n".join(_text(line) for line in facts.config.splitlines())
        parts.append(_details("Resolved configuration", f"<p>{_text(CONFIG_NOTE)}</p><pre>{config}</pre>"))
    if facts.versions:
        parts.append(_details("Versions", _table(version_table(facts), label="Versions")))
    return "".join(parts)


def _listed(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f'<div class="card"><ul>{"".join(f"<li>{_text(line)}</li>" for line in lines)}</ul></div>'


def _footer(facts: RunFacts) -> str:
    mark = "" if facts.certified else f"<strong>{NO_GUARANTEE}.</strong> "
    rounding = "Epsilon and delta are rounded up." if facts.certified else ""
    return f"<footer><p>{mark}The same facts as data: privacy_report.json. {rounding}</p></footer>"


def render_html(facts: RunFacts) -> str:
    """Returns the whole page; without a certificate it says so first and last and shows no value of epsilon."""
    facts = facts.public()
    shown = [plot for plot in TRAINING_PLOTS if facts.certified or plot.draw is not epsilon_against_steps]
    plots = "".join(_figure(plot, facts) for plot in shown)
    layers = "".join(_figure(plot, facts) for plot in LAYER_PLOTS) if facts.groups else ""
    warnings = "".join(
        f'<p class="caution" role="note"><strong>Caution.</strong> {_text(text)}</p>' for text in cautions(facts)
    )
    released = _table_card(
        release_table(facts), "Released without privacy", "Nothing else was released from the private data."
    )
    plan = _section("Privacy plan", _table_card(plan_facts_table(facts), "Privacy plan"))
    metrics = _section("Metrics", _table_card(metric_table(facts), "Metrics", "No metric was recorded."))
    body = [
        f'<header><p class="eyebrow">Privacy report</p><h1>{_text(facts.title)}</h1>'
        f'<p class="when">{_text(facts.created)}</p></header>',
        _hero(facts),
        warnings,
        _section("The run", f'<div class="grid plots">{plots}</div>'),
        _section("Layers", f'<div class="grid plots">{layers}</div>' if layers else ""),
        _table_card(layer_table(facts), "Layers", kind="layers").replace("<div", '<div style="margin-top:1.1rem"', 1),
        f'<div class="grid">{plan}<div>{metrics}{_section("What was not private", released)}</div></div>',
        _calibration(facts),
        _section("Ledger", _table_card(ledger_table(facts), "Ledger")),
        _section("What was declared", _listed(facts.data)),
        _section("Notes", _listed(facts.notes)),
        _section("Configuration and versions", _folded(facts)),
        _footer(facts),
    ]
    mark = "" if facts.certified else "NOT PRIVATE: "
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{mark}{_text(facts.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    return clean_lines(page)  # the whole page is cleaned, since figures hold names too
