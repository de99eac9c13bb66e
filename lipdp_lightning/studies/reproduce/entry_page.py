"""Renders `NAME.md`: what was run, its results, published numbers beside ours, and every row with its epsilon."""

from __future__ import annotations

from collections.abc import Sequence

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.entry import PRIVACY_COLUMNS, Entry, Row, Rows, Value, describe_epsilon, text_of
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.store import columns_of

_HEADINGS = {"certified_epsilon": "certified ε", "claimed_epsilon": "claimed ε", "delta": "δ"}
_ABOUT_EPSILON = (
    "The certified ε is what this project proves about the row's release, with the δ and the relation beside it. "
    "Rows of different relations must not be compared. The cells' secrets are fixed, so that a run can be repeated: "
    "the certificate is that of the mechanism, as if its secret were drawn and kept."
)


def page(
    entry: Entry, out: Output, rows: Rows, failed: Rows, total: int, paragraph: str, made_by: str, command: str
) -> str:
    """Returns the whole page in Markdown."""
    parts = [f"# {entry.title}", f"Source: {entry.source}. Made by {made_by}:", f"```bash\n{command}\n```"]
    if failed or len(rows) < total:
        parts.append(f"**Not complete: {len(rows)} of {total} cells have a result.** The same command continues.")
    if paragraph:
        parts.append(paragraph)
    parts += [f"![{alt}]({file})" for file, alt in out.figures]
    if entry.claims and paragraph:
        claims = [[claim.what, claim.published, claim.ours(rows)] for claim in entry.claims]
        parts += ["## Published and ours", table(["", "published", "ours"], claims)]
    if rows:
        shown = rows if entry.table is None else entry.table(rows)
        parts += ["## Rows", _ABOUT_EPSILON, rows_table(shown)]
        if entry.table is not None:
            parts.append(f"Every one of the {len(rows)} rows is in `{out.name}.csv`.")
    if failed:
        parts += ["## Failed cells", rows_table(failed, privacy=False)]
    return "\n\n".join(parts) + "\n"


def rows_table(rows: Rows, privacy: bool = True) -> str:
    """Returns rows as a table, which must state the privacy of each."""
    names = columns_of(rows)
    missing = [name for name in PRIVACY_COLUMNS if privacy and name not in names]
    assert not missing, f"the table leaves out {', '.join(missing)}"
    return table([_HEADINGS.get(name, name) for name in names], [[_shown(row, name) for name in names] for row in rows])


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    rule = ["---"] * len(heads)
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in [heads, rule, *lines])


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _shown(row: Row, name: str) -> str:
    value: Value = row.get(name)
    if name == "certified_epsilon":
        return describe_epsilon(value)
    if isinstance(value, float) and ("epsilon" in name or name == "delta"):
        return upper_text(value)
    return f"{value:.4g}" if isinstance(value, float) else text_of(value, name)
