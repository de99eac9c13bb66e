"""Names and categories that YAML could take for something else, and any schema with such names."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

AWKWARD = [
    "# meds",
    "no",
    "Yes",
    "on",
    "null",
    "~",
    "1e3",
    "007",
    "1_000",
    "12:30",
    "2020-01-01",
    "",
    " a",
    "a: b",
    "[x]",
    "{",
    "Müller",
    "名",
    "\u2028",
    "\x85",
    "\t",
    "'",
    '"',
    "\\",
    "!tag",
    "&a",
    "*a",
    "%",
    "@",
    "`",
    "-",
    "?",
    "=",
    "<<",
    ".5",
    "1.",
    "0x1F",
    "nan",
    ".inf",
    "true",
    "\U0001f600",
    "a#b",
    "#",
    "a\nb",
    "y",
    "N",
    "+1",
    "1.e5",
]
TEXT = st.one_of(st.sampled_from(AWKWARD), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6))


def distinct(minimum: int) -> Any:
    return st.lists(TEXT, min_size=minimum, max_size=4, unique=True)


@st.composite
def contents(draw: Any) -> dict[str, Any]:
    """Any schema, with names and categories that YAML could take for something else."""
    names = draw(st.lists(TEXT, min_size=3, max_size=6, unique=True))
    label, ignored, *features = names
    columns: list[dict[str, Any]] = []
    for name in features:
        kind = draw(st.sampled_from(["number", "category", "date"]))
        if kind == "number":
            low, high = sorted(draw(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=2, unique=True)))
            columns.append({"name": name, "low": low, "high": high, "log": draw(st.booleans())})
        elif kind == "category":
            columns.append(
                {
                    "name": name,
                    "categories": [[text, f"{text}!"] if len(text) % 2 else text for text in draw(distinct(1))],
                }
            )
        else:
            columns.append({"name": name, "date": "%Y-%m-%d", "low": "1900-01-01", "high": "2000-02-29"})
    content: dict[str, Any] = {"rows": draw(st.integers(1, 10**9)), "columns": columns, "ignore": [ignored]}
    content["label"] = {"name": label, "values": draw(distinct(2))}
    content["aliases"] = dict(zip(draw(distinct(0)), features, strict=False))
    content["missing"] = {"markers": draw(distinct(0)), "policy": "bucket"}
    return content
