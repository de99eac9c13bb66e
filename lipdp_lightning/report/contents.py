"""Holds the tables of a report as text, shared by the Markdown and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lipdp_lightning.report.formats import clean_text, format_bound, format_cell, format_number, is_number
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.tables import certificate_columns, plan_rows
from lipdp_lightning.report.words import budget_shares, format_metric, plan_facts, source_words

__all__ = [
    "Table",
    "layer_table",
    "ledger_table",
    "make_table",
    "metric_table",
    "plan_facts_table",
    "release_table",
    "version_table",
]


@dataclass(frozen=True)
class Table:
    """Headers, rows of text, and which columns hold numbers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)


def make_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Returns a table of values as text; a column is numeric if all its values are numbers."""

    def numeric(index: int) -> bool:
        present = [row[index] for row in rows if row[index] is not None]
        return bool(present) and all(is_number(value) or isinstance(value, bool) for value in present)

    flags = tuple(numeric(index) for index in range(len(headers)))
    text = tuple(tuple(format_cell(value) for value in row) for row in rows)
    return Table(tuple(clean_text(header) for header in headers), text, flags)


def plan_facts_table(facts: RunFacts) -> Table:
    """Returns the table of the privacy plan."""
    return Table(("quantity", "value"), tuple(plan_rows(plan_facts(facts))), (False, True))


def metric_table(facts: RunFacts) -> Table:
    """Returns each metric, its value, and the data that it was computed on."""
    rows = tuple(
        (clean_text(name), clean_text(format_metric(name, value)), source_words(facts, name))
        for name, value in facts.metrics.items()
    )
    return Table(("metric", "value", "computed on"), rows, (False, True, False))


def layer_table(facts: RunFacts) -> Table:
    """Returns the certificate per layer and, where it is defined, each layer's share of a step's privacy budget."""
    columns = certificate_columns(facts.groups)
    rows: list[list[Any]] = [[group.get(key) for key, _ in columns] for group in facts.groups]
    headers = [header for _, header in columns]
    shares = budget_shares(facts) if facts.certified else None
    if shares is not None:
        headers.append("budget share")
        for row, share in zip(rows, shares, strict=True):
            row.append(f"{format_number(100 * share, 3)} %")
    table = make_table(headers, rows)
    if shares is None:
        return table
    return Table(table.headers, table.rows, (*table.numeric[:-1], True))


def ledger_table(facts: RunFacts) -> Table:
    """Returns the mechanisms that accessed the private data, in order."""
    keys = list(dict.fromkeys(str(key) for entry in facts.ledger for key in entry))
    rows = [[_cost(key, _get(entry, key)) for key in keys] for entry in facts.ledger]
    return make_table([key.replace("_", " ") for key in keys], rows)


def _cost(key: str, value: Any) -> Any:
    """Returns an epsilon or a delta as text that is not below it, and any other value unchanged."""
    return format_bound(value) if (key == "delta" or "epsilon" in key) and is_number(value) else value


def _get(entry: Mapping[Any, Any], key: str) -> Any:
    return next((value for name, value in entry.items() if str(name) == key), None)


def release_table(facts: RunFacts) -> Table:
    """Returns what was released without privacy, and why."""
    rows = []
    for item in facts.released_without_privacy():
        name, _, why = clean_text(item).partition(":")
        rows.append((name.strip(), why.strip() or "no reason given"))
    return Table(("released without privacy", "why"), tuple(rows), (False, False))


def version_table(facts: RunFacts) -> Table:
    """Returns the software that the run used."""
    rows = tuple((clean_text(name), clean_text(value)) for name, value in facts.versions.items())
    return Table(("software", "version"), rows, (False, False))
