"""Declares what a table's columns may hold, and the encoding that follows from it.

Ranges and categories are constants of the schema: clipping to a declared range and one-hot coding over declared
categories are functions of one row and of public values. Nothing is fitted, so nothing enters the ledger.
"""

from __future__ import annotations

import codecs
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from lipdp_lightning.data_modules.table_cells import (
    PLAIN,
    ColumnProblem,
    NumberFormat,
    day_text,
    parse_days,
    parse_numbers,
    texts,
)
from lipdp_lightning.data_modules.units import Grouping

SCALES = {"unit": (0.0, 1.0), "symmetric": (-1.0, 1.0)}
MISSING_POLICIES = ("error", "bucket", "drop")
Reader = Callable[[Sequence[Any]], np.ndarray]
Spellings = str | tuple[str, ...]


def spellings(value: Spellings) -> tuple[str, ...]:
    """Returns the texts that stand for one category or class; the first is its name."""
    return (value,) if isinstance(value, str) else value


def _codes(cells: Sequence[Any], values: Sequence[Spellings], unknown: int) -> np.ndarray:
    position = {text: code for code, value in enumerate(values) for text in spellings(value)}
    return np.array([position.get(text, unknown) for text in texts(cells)], dtype=np.int64)


def scale_declared(
    values: np.ndarray,
    low: np.ndarray | float,
    high: np.ndarray | float,
    scale: str = "unit",
    log: bool = False,
) -> np.ndarray:
    """Clips to the declared [low, high] and maps onto [0, 1] or [-1, 1]; with `log`, in terms of log(1 +
    value - low).
    """
    share = (np.clip(values, low, high) - low) / (np.asarray(high) - low)
    if log:
        width = np.asarray(high) - low
        share = np.log1p(share * width) / np.log1p(width)
    first, last = SCALES[scale]
    return np.asarray(first + (last - first) * share)


def _filled(cells: Sequence[Any], missing: np.ndarray, constant: float, read: Reader) -> np.ndarray:
    """Returns the numbers of a column, with a public constant where one is missing, which reveals no other row."""
    if not missing.any():
        return read(cells)
    kept = np.flatnonzero(~missing)
    try:
        present = read([cells[index] for index in kept.tolist()])
    except ColumnProblem as found:
        raise ColumnProblem(int(kept[found.index]), found.what, found.value, found.noun) from None
    numbers = np.full(len(cells), constant, dtype=present.dtype)
    numbers[kept] = present
    return numbers


@dataclass(frozen=True)
class Numeric:
    """A number clipped to the declared [low, high]; `log` spreads a long upper tail.

    With `bins`, the declared range (or its logarithm if `log` is set) is cut into that many equal parts, and the number
    is followed by a one-hot block that names its part.
    """

    name: str
    low: float
    high: float
    log: bool = False
    bins: int = 0
    written: NumberFormat = PLAIN
    noun: ClassVar[str] = "a number"

    def problems(self) -> list[str]:
        problems = self.written.problems()
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            problems.append(f"column {self.name!r}: low = {self.low} and high = {self.high} are not a finite range")
        if isinstance(self.bins, bool) or not isinstance(self.bins, int) or self.bins < 0 or self.bins == 1:
            problems.append(f"column {self.name!r}: bins is {self.bins!r}, not 0 or a whole number from 2")
        return problems

    def width(self, missing_bucket: bool) -> int:
        return 1 + self.bins

    def squared_norm(self) -> int:
        """Returns 1 for the number, which is within [-1, 1], plus 1 for the entry of the block that is 1."""
        return 1 + (self.bins > 0)

    def block(self, encoded: np.ndarray) -> np.ndarray:
        """Returns the one-hot part of the encoded column, which is empty without bins."""
        return encoded[:, 1:]

    def numbers(self, cells: Sequence[Any]) -> np.ndarray:
        """Returns the cells as numbers."""
        return parse_numbers(cells, self.written)

    def encode(self, values: Sequence[Any], missing: np.ndarray, scale: str, missing_bucket: bool) -> np.ndarray:
        numbers = _filled(values, missing, (self.low + self.high) / 2, self.numbers)
        number = scale_declared(numbers, self.low, self.high, scale, self.log)[:, None]
        if not self.bins:
            return number
        share = scale_declared(numbers, self.low, self.high, "unit", self.log)
        part = np.minimum((share * self.bins).astype(np.int64), self.bins - 1)
        return np.hstack([number, np.eye(self.bins)[part]])

    def limits(self) -> str:
        """Returns the declared range as text."""
        return f"[{self.low:g}, {self.high:g}]"

    def describe(self) -> str:
        cut = f", {self.bins} equal parts" if self.bins else ""
        return f"{self.name} in {self.limits()}" + (", log" if self.log else "") + cut

    def sentence(self, missing_bucket: bool) -> str:
        """Returns what becomes of the column, in words."""
        places = (
            f"{self.width(missing_bucket)} numbers of a row: its place in the range, and which of {self.bins} parts"
        )
        becomes = places if self.bins else "one number of a row: its place in the range"
        how = ", on a logarithmic scale" if self.log else ""
        return f"{self.name!r} is {self.noun}, clipped to {self.limits()}; it becomes {becomes}{how}."


@dataclass(frozen=True)
class Date(Numeric):
    """A date clipped to a declared first and last day; `low` and `high` are days since 1970.

    Args:
        form: how a date is written, in the letters of `strptime`, such as `%d.%m.%Y`.
    """

    form: str = "%Y-%m-%d"
    noun: ClassVar[str] = "a date"

    def numbers(self, cells: Sequence[Any]) -> np.ndarray:
        return parse_days(cells, self.form)

    def limits(self) -> str:
        return f"[{day_text(self.low)}, {day_text(self.high)}]"


@dataclass(frozen=True)
class Categorical:
    """One of the declared categories, one-hot; with `other`, anything else falls into one more bucket.

    A category is a text, or a tuple of the texts that stand for it.
    """

    name: str
    categories: tuple[Spellings, ...]
    other: bool = False

    def problems(self) -> list[str]:
        every = [text for category in self.categories for text in spellings(category)]
        if not self.categories or len(set(every)) != len(every) or not all(map(spellings, self.categories)):
            return [f"column {self.name!r}: categories must be distinct and at least one, got {self.categories}"]
        return []

    def width(self, missing_bucket: bool) -> int:
        return len(self.categories) + self.other + missing_bucket

    def squared_norm(self) -> int:
        """Returns 1, since one entry is 1."""
        return 1

    def block(self, encoded: np.ndarray) -> np.ndarray:
        """Returns the one-hot part, which is the whole encoding."""
        return encoded

    def encode(self, values: Sequence[Any], missing: np.ndarray, scale: str, missing_bucket: bool) -> np.ndarray:
        unknown = len(self.categories) if self.other else -1
        last = self.width(missing_bucket) - 1
        codes = _filled(values, missing, last, lambda cells: _codes(cells, self.categories, unknown))
        if (codes < 0).any():
            index = int(np.argmax(codes < 0))
            raise ColumnProblem(index, "is not a declared category", values[index])
        return np.eye(self.width(missing_bucket))[codes]

    def describe(self) -> str:
        return f"{self.name}: {len(self.categories)} categories" + (" and other" if self.other else "")

    def sentence(self, missing_bucket: bool) -> str:
        """Returns what becomes of the column, in words."""
        rest = "others fall into one more" if self.other else "another value is refused"
        becomes = f"it becomes {self.width(missing_bucket)} numbers of a row"
        return f"{self.name!r} is one of {len(self.categories)} categories, and {rest}; {becomes}."


@dataclass(frozen=True)
class ClassLabel:
    """A class label; each class has one spelling or several."""

    name: str
    values: tuple[tuple[str, ...], ...]

    def problems(self) -> list[str]:
        spellings = [spelling for value in self.values for spelling in value]
        if len(self.values) < 2 or len(set(spellings)) != len(spellings):
            return [f"label {self.name!r}: at least two classes with distinct spellings are needed"]
        return []

    def encode(self, values: Sequence[Any]) -> np.ndarray:
        codes = _codes(values, self.values, -1)
        if (codes < 0).any():
            index = int(np.argmax(codes < 0))
            raise ColumnProblem(index, "is not one of the declared classes", values[index], "label")
        return codes

    def sentence(self) -> str:
        """Returns what is predicted, in words."""
        return f"{self.name!r} is predicted, as one of {len(self.values)} classes; another value is refused."


@dataclass(frozen=True)
class NumberLabel:
    """A regression target, mapped from the declared [low, high] onto [-1, 1]; a value outside is an error."""

    name: str
    low: float
    high: float
    written: NumberFormat = PLAIN

    def problems(self) -> list[str]:
        return Numeric(self.name, self.low, self.high).problems()

    def encode(self, values: Sequence[Any]) -> np.ndarray:
        numbers = parse_numbers(values, self.written)
        outside = (numbers < self.low) | (numbers > self.high)
        if outside.any():
            index = int(np.argmax(outside))
            limits = f"[{self.low:g}, {self.high:g}]"
            raise ColumnProblem(index, f"is outside the declared {limits}", float(numbers[index]), "target")
        return scale_declared(numbers, self.low, self.high, "symmetric").astype(np.float32)

    def sentence(self) -> str:
        """Returns what is predicted, in words."""
        limits = f"[{self.low:g}, {self.high:g}]"
        return f"{self.name!r} is predicted, as a number in {limits}; a value outside is refused."


@dataclass(frozen=True)
class TableSchema:
    """A table's declaration.

    Args:
        columns: the features, in the order they are encoded.
        label: the target column.
        names: all column names of a file without a header line, in file order; None if the file has one.
        missing: markers of a missing value.
        missing_policy: `error`; `bucket` (a category of its own, the middle of a numeric range); or `drop` (the row is
            left out, which is decided by that row alone).
        crosses: pairs of columns whose joint category is one-hot coded behind the columns; a number needs `bins`.
        ignore: columns of the file that are not used.
        aliases: other names under which the header may list a column, as {name in the file: declared name}.
        encoding: the encoding of a text file, a name that Python knows.
    """

    columns: tuple[Numeric | Categorical, ...]
    label: ClassLabel | NumberLabel
    names: tuple[str, ...] | None = None
    delimiter: str = ","
    comment: str | None = None
    missing: tuple[str, ...] = ("",)
    missing_policy: str = "error"
    scale: str = "unit"
    crosses: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    grouping: Grouping | None = None
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        problems = [problem for part in (*self.columns, self.label) for problem in part.problems()]
        used = [column.name for column in self.columns] + [self.label.name]
        problems += [f"{name!r} is declared twice" for name in sorted({n for n in used if used.count(n) > 1})]
        problems += [f"{name!r} is both declared and ignored" for name in used if name in self.ignore]
        problems += self._cross_problems()
        if self.grouping is not None and self.grouping.column in self.ignore:
            problems.append(f"{self.grouping.column!r} names the group and is ignored")
        if not self.columns:
            problems.append("no feature column is declared")
        if self.names is not None and len(set(self.names)) != len(self.names):
            problems.append("names lists a column twice")
        if self.scale not in SCALES:
            problems.append(f"scale is {self.scale!r}, not one of {', '.join(SCALES)}")
        if self.missing_policy not in MISSING_POLICIES:
            problems.append(f"missing_policy is {self.missing_policy!r}, not one of {', '.join(MISSING_POLICIES)}")
        problems += encoding_problems(self.encoding)
        if len(self.delimiter) != 1:
            problems.append(f"delimiter is {self.delimiter!r}, not one character")
        if problems:
            raise ValueError("table schema: " + "; ".join(problems) + "\nHINT: correct the schema")

    def _cross_problems(self) -> list[str]:
        named = {column.name: column for column in self.columns}
        problems = []
        for pair in self.crosses:
            unknown = [name for name in pair if name not in named]
            if len(pair) != 2 or pair[0] == pair[1] or unknown:
                problems.append(f"cross {list(pair)} is not a pair of two declared columns")
                continue
            bare = [name for name in pair if isinstance(named[name], Numeric) and not named[name].bins]  # type: ignore[union-attr]
            problems += [f"cross {list(pair)}: {name!r} is a number without bins" for name in bare]
        return problems

    @property
    def bucket(self) -> bool:
        return self.missing_policy == "bucket"

    def spans(self) -> dict[str, slice]:
        """Returns the places of each column's numbers in an encoded row."""
        spans, start = {}, 0
        for column in self.columns:
            spans[column.name] = slice(start, start := start + column.width(self.bucket))
        return spans

    def cross_width(self, pair: tuple[str, str]) -> int:
        """Returns the length of a cross's block."""
        named = {column.name: column for column in self.columns}
        return math.prod(
            column.width(self.bucket) - isinstance(column, Numeric) for column in (named[name] for name in pair)
        )

    @property
    def width(self) -> int:
        """The length of an encoded row."""
        return sum(c.width(self.bucket) for c in self.columns) + sum(self.cross_width(pair) for pair in self.crosses)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an encoded row."""
        return (self.width,)

    @property
    def input_bound(self) -> float:
        """The norm bound: a column adds its squared norm, 1 for a number in [-1, 1] or a one-hot block; a
        cross adds 1.
        """
        return math.sqrt(sum(column.squared_norm() for column in self.columns) + len(self.crosses))


def encoding_problems(encoding: str) -> list[str]:
    """Returns what is wrong with the name of an encoding."""
    try:
        "a".encode(codecs.lookup(encoding).name)
    except (LookupError, ValueError):
        return [f"encoding is {encoding!r}, not one that Python knows, such as utf-8, latin-1 or cp1252"]
    return []


def expanded(schema: TableSchema, bins: int = 0, crosses: bool = False) -> TableSchema:
    """Returns the schema with every number cut into `bins` parts, and with the joint category of every pair
    of columns.
    """
    columns = tuple(replace(c, bins=bins) if bins and isinstance(c, Numeric) else c for c in schema.columns)
    blocks = [c.name for c in columns if isinstance(c, Categorical) or c.bins]
    pairs = tuple(itertools.combinations(blocks, 2)) if crosses else schema.crosses
    return replace(schema, columns=columns, crosses=pairs)
