"""Reads the cells of a table, each by itself: text of a file, or the values of a DataFrame."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

_DAY = datetime.timedelta(days=1)
_EPOCH = datetime.datetime(1970, 1, 1)
# the missing values of pandas have types of their own
_MISSING_TYPES = ("NAType", "NaTType")
LARGEST_EXACT = 2**53


class ColumnProblem(Exception):
    """Reports a cell that breaks the declaration: its position in the column and what is wrong with it.

    Args:
        index: the position in the column.
        what: what is wrong with the cell, as the end of a sentence.
        value: the cell, which only the owner of a file is shown; None if there is nothing to show.
        noun: what the cell is.
    """

    def __init__(self, index: int, what: str, value: object = None, noun: str = "value") -> None:
        self.index, self.what, self.value, self.noun = index, what, value, noun
        super().__init__(self.told(shows_value=True))

    def told(self, shows_value: bool) -> str:
        """Returns the problem in words, with or without the cell itself."""
        if self.value is None or not shows_value:
            return f"the {self.noun} {self.what}"
        return f"{'' if self.noun == 'value' else f'{self.noun} '}{self.value!r} {self.what}"


@dataclass(frozen=True)
class NumberFormat:
    """Declares how numbers are written: `1.234,5` has the decimal mark `,` and the thousands mark `.`."""

    decimal: str = "."
    thousands: str = ""

    def problems(self) -> list[str]:
        marks = [mark for mark in (self.decimal, self.thousands) if mark]
        taken = [mark for mark in marks if len(mark) != 1 or mark.isdigit() or mark in "+-eE_"]
        if taken or not self.decimal or self.decimal == self.thousands:
            return [
                f"numbers: decimal is {self.decimal!r} and thousands is {self.thousands!r}, not two different marks"
            ]
        return []

    def describe(self) -> str:
        between = f", {self.thousands!r} between thousands" if self.thousands else ""
        return f"numbers are written with the decimal mark {self.decimal!r}{between}"

    @property
    def is_plain(self) -> bool:
        return self == NumberFormat()

    def plain(self, text: str) -> str:
        """Returns the number as Python writes it; raises ValueError if the marks are not where they belong."""
        found = _pattern(self.decimal, self.thousands).fullmatch(text.strip())
        if found is None:
            raise ValueError
        whole, rest, power = found["whole"], found["rest"] or "", found["power"] or ""
        return f"{found['sign']}{whole.replace(self.thousands, '') if self.thousands else whole}.{rest}0{power}"


@lru_cache(maxsize=32)
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    grouped = rf"[0-9]{{1,3}}(?:{re.escape(thousands)}[0-9]{{3}})+|" if thousands else ""
    return re.compile(
        rf"(?P<sign>[+-]?)(?P<whole>{grouped}[0-9]+)(?:{re.escape(decimal)}(?P<rest>[0-9]*))?(?P<power>[eE][+-]?[0-9]+)?"
    )


PLAIN = NumberFormat()


def is_missing(cell: object, markers: Collection[str]) -> bool:
    """Returns whether a cell is empty, not a number, or one of the declared marks of a missing value."""
    if isinstance(cell, str):
        return cell in markers
    if cell is None or type(cell).__name__ in _MISSING_TYPES:
        return True
    if isinstance(cell, float | np.floating | Decimal) and cell != cell:
        return True
    if isinstance(cell, np.datetime64) and np.isnat(cell):
        return True
    try:
        return len(markers) > 1 and text_of(cell) in markers
    except ValueError:  # a number without a text of its own is no mark
        return False


def text_of(cell: Any) -> str:
    """Returns a cell as the text that a category is declared by.

    A whole number is written without a point, whatever its type: a DataFrame holds integers as floats as soon as one
    of them is missing, and no row may change how another is read.

    Raises:
        ValueError: if there is no value, or a float is too large to tell whole numbers apart.
    """
    if isinstance(cell, str):
        return cell
    if is_missing(cell, {""}):
        raise ValueError("is missing")
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, float | Decimal) and math.isfinite(cell):
        if isinstance(cell, float) and abs(cell) >= LARGEST_EXACT:
            raise ValueError("is a float beyond 2^53, which does not tell whole numbers apart: keep the column as text")
        return str(int(cell)) if cell == int(cell) else str(cell)
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "replace").strip()
    return str(cell).strip()


def texts(cells: Sequence[Any]) -> list[str]:
    """Returns every cell as text; the first that has none raises a ColumnProblem."""
    return list(cells) if _kinds(cells) <= {str} else _each(cells, text_of)


def stripped(cells: Sequence[Any]) -> list[Any]:
    """Returns the cells, those that are text without blanks around them, as a CSV file is read."""
    return [cell.strip() if isinstance(cell, str) else cell for cell in cells]


def _kinds(cells: Sequence[Any]) -> set[type]:
    return set(map(type, cells))


def _each(cells: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    found = []
    for index, cell in enumerate(cells):
        try:
            found.append(read(cell))
        except ValueError as error:
            raise ColumnProblem(index, str(error), cell) from None
    return found


def parse_numbers(cells: Sequence[Any], written: NumberFormat = PLAIN) -> np.ndarray:
    """Returns finite decimal numbers; the first cell that is not one raises a ColumnProblem."""

    def number(cell: Any) -> float:
        try:
            if isinstance(cell, str):
                # Python reads 1_000 as a thousand, but in a table it is a typing error
                value = float("none" if "_" in cell else cell if written.is_plain else written.plain(cell))
            elif isinstance(cell, Real | Decimal | np.bool_):
                value = float(cell)
            else:
                raise ValueError
        except (ValueError, OverflowError):
            how = "" if written.is_plain else f" with the declared marks ({written.describe()})"
            raise ValueError(f"is not a number{how}") from None
        if not math.isfinite(value):
            raise ValueError("is not a finite number")
        return value

    if written.is_plain and _kinds(cells) <= {str, float, int}:
        # most columns have no problem, and are read faster without looking for one
        with suppress(ValueError, OverflowError):
            numbers = np.array([float(cell) for cell in cells], dtype=np.float64)
            if np.isfinite(numbers).all() and not any(isinstance(cell, str) and "_" in cell for cell in cells):
                return numbers
    return np.array(_each(cells, number), dtype=np.float64)


def parse_days(cells: Sequence[Any], form: str) -> np.ndarray:
    """Returns dates as days since 1970; text is read by `form`, in the letters of `strptime`."""
    known: dict[str, float] = {}

    def days(cell: Any) -> float:
        if not isinstance(cell, str):
            return days_of(cell)
        if cell not in known:
            try:
                known[cell] = days_of(datetime.datetime.strptime(cell, form))
            except ValueError:
                raise ValueError(f"is not a date of the declared form {form!r}") from None
        return known[cell]

    return np.array(_each(cells, days), dtype=np.float64)


def days_of(moment: Any) -> float:
    """Returns a date, with its time of day if it has one, as days since 1970."""
    if isinstance(moment, np.datetime64):
        moment = moment.astype("datetime64[us]").item()
    if isinstance(moment, datetime.datetime):
        if moment.tzinfo is not None:
            moment = moment.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        return (moment - _EPOCH) / _DAY
    if isinstance(moment, datetime.date):
        return float((moment - _EPOCH.date()).days)
    raise ValueError("is not a date")


def day_text(days: float) -> str:
    """Returns days since 1970 as a date, or as a date and a time."""
    moment = _EPOCH + datetime.timedelta(days=days)
    return moment.date().isoformat() if moment.time() == datetime.time() else moment.isoformat(" ")
