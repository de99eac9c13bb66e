"""Renders ``privacy_report.md``, the report as a text file that is readable as it is."""

from __future__ import annotations

import re
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
from lipdp_lightning.report.formats import clean_lines, clean_text, format_bound
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.words import (
    NO_GUARANTEE,
    adjacency_words,
    cautions,
    find_primary_metric,
    format_metric,
    guarantee_sentence,
    source_words,
)

__all__ = ["escape_markdown", "render_markdown"]

CONFIG_NOTE = "A value of epsilon in a configuration is a target, not a guarantee."


def escape_markdown(value: Any) -> str:
    """Returns one line of text in which no character is Markdown or HTML."""
    text = clean_text(value)
    text = re.sub(r"([\\`*\[\]|#~])", r"\\\1", text)
    # an underscore inside a word, as in most parameter names, is not emphasis
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _table(table: Table) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = tuple("---:" if numeric else "---" for numeric in table.numeric)
    rows = [tuple(escape_markdown(cell) for cell in row) for row in (table.headers, *table.rows)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"


def _headline(facts: RunFacts) -> list[str]:
    if facts.certified:
        lines = [
            f"**certified: true. epsilon = {format_bound(facts.epsilon)} at delta = "
            f"{format_bound(facts.delta)}** for {escape_markdown(adjacency_words(facts))}"
        ]
    else:
        lines = [f"**{NO_GUARANTEE}**"]
    lines.append(escape_markdown(guarantee_sentence(facts)))
    metric = find_primary_metric(facts)
    if metric is not None and metric in facts.metrics:
        value = format_metric(metric, facts.metrics[metric])
        lines.append(f"{escape_markdown(metric)}: **{escape_markdown(value)}** ({source_words(facts, metric)})")
    return lines + [f"> **Caution.** {escape_markdown(text)}" for text in cautions(facts)]


def render_markdown(facts: RunFacts) -> str:
    """Returns the whole report; without a certificate it says so first and last and shows no value of epsilon."""
    facts = facts.public()
    blocks = [f"# {escape_markdown(facts.title)}", *_headline(facts)]
    if facts.created:
        blocks.insert(1, escape_markdown(facts.created))

    def section(title: str, table: Table, otherwise: str = "") -> None:
        if table or otherwise:
            blocks.extend([f"## {title}", _table(table) if table else otherwise])

    section("Metrics", metric_table(facts), "No metric was recorded.")
    for result in facts.calibration:
        words = escape_markdown(calibration_words(result, facts.certified))
        blocks.extend([f"## Calibration, {escape_markdown(result['stage'])} rows", words, _table(result_table(result))])
    section("Layers", layer_table(facts))
    section("Privacy plan", plan_facts_table(facts))
    section("Ledger", ledger_table(facts))
    section("What was not private", release_table(facts), "Nothing else was released.")
    if facts.data:
        blocks.extend(["## What was declared", "\n".join(f"- {escape_markdown(line)}" for line in facts.data)])
    if facts.notes:
        blocks.extend(["## Notes", "\n".join(f"- {escape_markdown(note)}" for note in facts.notes)])
    if facts.config:
        blocks.extend(["## Configuration", CONFIG_NOTE, _fenced(facts.config)])
    section("Versions", version_table(facts))
    if not facts.certified:
        blocks.append(f"**{NO_GUARANTEE}**")
    # the whole text is cleaned, since it quotes the configuration and a terminal or an editor may show the file
    return clean_lines("\n\n".join(blocks)) + "\n"
