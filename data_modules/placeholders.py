"""Marks what only the owner of the data knows, and refuses to go on before it is filled in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FILL_IN = "FILL_IN"

# what an entry is, why it cannot be read from the rows or chosen for the owner, and an example
_ENTRIES = {
    "rows": (
        "the announced number of rows, or of groups where groups are drawn, is a constant of the plan; the length of "
        "the file changes with every row",
        "the number in the study's protocol, rounded, such as rows: 2000",
    ),
    "kind": (
        "only you know what the column holds; a type that is guessed from the rows can change with one row",
        "write low and high of a number, categories, or date with low and high; or move the name to ignore",
    ),
    "low": (
        "the smallest value in the rows tells that somebody has it, so the range comes from the code book",
        "the smallest value that is possible, such as low: 0; smaller ones are clipped",
    ),
    "high": (
        "the largest value in the rows tells that somebody has it, so the range comes from the code book",
        "the largest value that is sensible, such as high: 120; larger ones are clipped",
    ),
    "categories": (
        "a rare category in the rows tells that somebody is in it, so the list comes from the questionnaire",
        "every answer that is possible, such as categories: [clerk, farmer]; other: true takes the rest",
    ),
    "values": (
        "the classes are what the model can say, and are known before the study",
        'the classes in order, such as values: ["no", "yes"]',
    ),
    "classes": ("the number of classes is what the model can say", "such as classes: 10"),
    "label": (
        "only you know which column is to be predicted",
        'label: {name: ..., values: ["no", "yes"]}, or low and high of a number',
    ),
    "date": ("only you know how a date is written", 'the letters of strptime, such as date: "%d.%m.%Y"'),
    "shape": (
        "the shape of one row decides the network, and images of another shape are refused",
        "channels, height and width of an image, such as shape: [3, 32, 32]",
    ),
    "max_rows": (
        "the number of rows of one group that may count multiplies what the group can change",
        "such as max_rows: 3; of a larger group, some rows are left out",
    ),
    "epsilon": (
        "how much may be learnt about one person is a decision, and no default fits all data",
        "1 is strong, 3 common and 8 weak; `lipdp budget` says what it costs",
    ),
    "loss": (
        "the loss follows from what is predicted",
        "two classes: lipdp_lightning.bounds.losses.BinaryCrossEntropy; more: cross_entropy; a number: huber",
    ),
    "batch_size": (
        "the expected number of rows of a step is a constant of the plan, as the number of rows is",
        "about a tenth of the rows, such as batch_size: 200 for 2000",
    ),
    "delta": (
        "the probability that the guarantee fails must be far below one over the number of rows",
        "such as 1.0e-6 for 10,000 rows, and never above 1 / rows",
    ),
}
_OTHER = ("it was left open", "write the value that holds for your data")


def placeholders(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys that lead to every placeholder, with the name of a column among them, and the entry's own key."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from placeholders(value, (*path, str(key)))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            named = isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"] != FILL_IN
            yield from placeholders(value, (*path, repr(value["name"]) if named else str(index)))
    elif content == FILL_IN:
        own = [word for word in path if not word.isdigit()]
        yield path, "label" if path[-2:] == ("label", "kind") else own[-1] if own else ""


def unfilled(content: Any, where: str) -> list[str]:
    """Returns a line for every placeholder: where it is, why the entry cannot be guessed, and an example.

    Args:
        content: the content of a schema or of a configuration.
        where: what holds it, such as a file.
    """
    lines = []
    for path, entry in placeholders(content):
        why, hint = _ENTRIES.get(entry, _OTHER)
        lines.append(f"{where}: {_shown(path)} is to be filled in: {why}.\nHINT: {hint}")
    return lines


def _shown(path: tuple[str, ...]) -> str:
    if "columns" not in path[:-1]:
        return ".".join(path[:-1] if path[-1] == "kind" else path)
    name, *inside = path[path.index("columns") + 1 :]
    return ": ".join([f"column {name}", *(word for word in inside if word != "kind")])


def refuse_placeholders(content: Any, where: str) -> None:
    """Raises one ValueError that lists every placeholder, if there are any."""
    if lines := unfilled(content, where):
        raise ValueError("\n".join(lines))
