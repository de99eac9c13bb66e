"""Inserts what an entry found into a page, so that no number of the page is typed by hand."""

from __future__ import annotations

from pathlib import Path

from lipdp_lightning.studies.reproduce.entry import Entry, Rows
from lipdp_lightning.studies.reproduce.entry_page import rows_table, table

MOST_ROWS = 25  # a longer table is left to the files that the command writes


def quotation(entry: Entry, rows: Rows, paragraph: str, made_by: str, command: str) -> str:
    """Returns the text that a page quotes: the command, the paragraph, published numbers beside ours, and few rows."""
    parts = [f"Made by {made_by}:", f"```sh\n{command}\n```", paragraph]
    if entry.claims:
        claims = [[claim.what, claim.published, claim.ours(rows)] for claim in entry.claims]
        parts.append(table(["", "published", "ours"], claims))
    shown = rows if entry.table is None else entry.table(rows)
    if len(shown) <= MOST_ROWS:
        parts.append(rows_table(shown))
    else:
        parts.append(left_out(entry.name, len(shown)))
    return "\n\n".join(parts)


def left_out(name: str, rows: int) -> str:
    """Returns the sentence in place of a long table."""
    return f"The command writes all {rows} rows, each with its certified ε, to `{name}.md` and `{name}.csv`."


def insert(page: Path, name: str, text: str) -> str:
    """Returns the page with the text between the entry's two marks, in place of what was there.

    Raises:
        ValueError: if the page does not hold each mark once, in order.
    """
    start, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    content = page.read_text(encoding="utf-8")
    if content.count(start) != 1 or content.count(end) != 1 or content.index(start) > content.index(end):
        raise ValueError(f"{page} has no place for {name}. HINT: write the lines {start} and {end} where it belongs.")
    before, _, rest = content.partition(start)
    return f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
