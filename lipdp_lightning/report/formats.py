"""Writes numbers and cells in one way for the terminal, Markdown and HTML."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lipdp_lightning.bound_text import upper_text

__all__ = [
    "clean_lines",
    "clean_text",
    "finite",
    "format_bound",
    "format_cell",
    "format_number",
    "is_number",
    "plain_value",
]

MISSING = "-"
NO_BREAK_SPACES = "\u00a0\u202f"


def plain_value(value: Any) -> Any:
    """Returns the Python number that a zero-dimensional array or tensor holds, and anything else unchanged."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def is_number(value: Any) -> bool:
    """Returns whether the value is an int or a float; a bool counts as neither."""
    return isinstance(plain_value(value), (int, float)) and not isinstance(plain_value(value), bool)


def finite(value: Any) -> float | None:
    """Returns a number as a float, or None if it is none, or not finite, or too large for one."""
    number = plain_value(value)
    if not is_number(number) or not abs(number) <= sys.float_info.max:
        return None
    return float(number)


def format_number(value: Any, digits: int = 4) -> str:
    """Returns a number with ``digits`` significant digits; integers are written in full."""
    number = plain_value(value)
    if isinstance(number, int):
        return str(number)
    if not math.isfinite(number):
        return "nan" if math.isnan(number) else ("inf" if number > 0 else "-inf")
    if number == int(number) and abs(number) < 1e7:
        return str(int(number))
    if 10**digits <= abs(number) < 1e7:
        return f"{number:.0f}"
    return f"{number:.{digits}g}"


def format_bound(value: Any, digits: int = 4) -> str:
    """Returns an upper bound, rounded UP: a printed epsilon or delta must not be smaller than the certified one."""
    return upper_text(plain_value(value), digits)


def format_duration(seconds: float) -> str:
    """Returns a time as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def clean_text(value: Any) -> str:
    """Returns one line of printable text; control characters (line breaks, terminal escapes) become spaces."""
    return "".join(char if char.isprintable() or char in NO_BREAK_SPACES else " " for char in str(value))


def clean_lines(value: Any) -> str:
    """Applies :func:`clean_text` to each line of a text."""
    return "\n".join(clean_text(line) for line in str(value).split("\n"))


def format_cell(value: Any) -> str:
    """Returns any value of a table as one line of text."""
    value = plain_value(value)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return format_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{clean_text(key)} {format_cell(item)}" for key, item in value.items()) or MISSING
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return ", ".join(format_cell(item) for item in value) or MISSING
    return clean_text(value)
