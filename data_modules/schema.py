"""What a table's columns may hold, declared in advance, and the encoding that follows from it.

Ranges and categories are constants of the schema: clipping to a declared range and one-hot coding over
declared categories are functions of one row and of public values. Nothing is fitted, so nothing enters the
ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SCALES = {"unit": (0.0, 1.0), "symmetric": (-1.0, 1.0)}
MISSING_POLICIES = ("error", "bucket", "drop")


class ColumnProblem(Exception):
    """A value that breaks the declaration: its position in the column and what is wrong with it."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index, self.problem = index, problem


def scale_declared(
    values: np.ndarray,
    low: np.ndarray | float,
    high: np.ndarray | float,
    scale: str = "unit",
    log: bool = False,
) -> np.ndarray:
    """Clip to the declared [low, high] and map onto [0, 1] or [-1, 1]; `log`: in log(1 + value - low)."""
    share = (np.clip(values, low, high) - low) / (np.asarray(high) - low)
    if log:
        width = np.asarray(high) - low
        share = np.log1p(share * width) / np.log1p(width)
    first, last = SCALES[scale]
    return np.asarray(first + (last - first) * share)


def parse_numbers(values: Sequence[str]) -> np.ndarray:
    """Finite decimal numbers, or a ColumnProblem at the first that is not one."""
    try:
        numbers = np.array([float(value) for value in values], dtype=np.float64)
        if np.isfinite(numbers).all() and not any("_" in value for value in values):
            return numbers
    except ValueError:
        pass
    for index, value in enumerate(values):
        try:
            # Python reads 1_000 as a thousand; in a table it is a typing error
            finite = "_" not in value and math.isfinite(float(value))
        except ValueError:
            raise ColumnProblem(index, f"{value!r} is not a number") from None
        if not finite:
            raise ColumnProblem(index, f"{value!r} is not a finite number")
    raise AssertionError("a column that fails as a whole fails in some row")


@dataclass(frozen=True)
class Numeric:
    """A number clipped to the declared [low, high]; `log` spreads a long upper tail."""

    name: str
    low: float
    high: float
    log: bool = False

    def problems(self) -> list[str]:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            return [f"column {self.name!r}: low = {self.low} and high = {self.high} are not a finite range"]
        return []

    def width(self, missing_bucket: bool) -> int:
        return 1

    def encode(self, values: Sequence[str], missing: np.ndarray, scale: str, missing_bucket: bool) -> np.ndarray:
        middle = repr((self.low + self.high) / 2)
        if missing.any():
            # a public constant, so that a missing value says nothing about the other rows
            values = [middle if gone else value for value, gone in zip(values, missing, strict=True)]
        return scale_declared(parse_numbers(values), self.low, self.high, scale, self.log)[:, None]

    def describe(self) -> str:
        return f"{self.name} in [{self.low:g}, {self.high:g}]" + (", log" if self.log else "")


@dataclass(frozen=True)
class Categorical:
    """One of the declared categories, one-hot; with `other`, anything else falls in one more bucket."""

    name: str
    categories: tuple[str, ...]
    other: bool = False

    def problems(self) -> list[str]:
        if not self.categories or len(set(self.categories)) != len(self.categories):
            return [f"column {self.name!r}: categories must be distinct and at least one, got {self.categories}"]
        return []

    def width(self, missing_bucket: bool) -> int:
        return len(self.categories) + self.other + missing_bucket

    def encode(self, values: Sequence[str], missing: np.ndarray, scale: str, missing_bucket: bool) -> np.ndarray:
        unknown = len(self.categories) if self.other else -1
        position = {category: index for index, category in enumerate(self.categories)}
        codes = np.array([position.get(value, unknown) for value in values], dtype=np.int64)
        codes[missing] = self.width(missing_bucket) - 1
        if (codes < 0).any():
            index = int(np.argmax(codes < 0))
            raise ColumnProblem(index, f"{values[index]!r} is not a declared category")
        return np.eye(self.width(missing_bucket))[codes]

    def describe(self) -> str:
        return f"{self.name}: {len(self.categories)} categories" + (" and other" if self.other else "")


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

    def encode(self, values: Sequence[str]) -> np.ndarray:
        position = {spelling: code for code, value in enumerate(self.values) for spelling in value}
        codes = np.array([position.get(value, -1) for value in values], dtype=np.int64)
        if (codes < 0).any():
            index = int(np.argmax(codes < 0))
            raise ColumnProblem(index, f"label {values[index]!r} is not one of the declared classes")
        return codes


@dataclass(frozen=True)
class NumberLabel:
    """A regression target, mapped from the declared [low, high] onto [-1, 1]; outside it is an error."""

    name: str
    low: float
    high: float

    def problems(self) -> list[str]:
        return Numeric(self.name, self.low, self.high).problems()

    def encode(self, values: Sequence[str]) -> np.ndarray:
        numbers = parse_numbers(values)
        outside = (numbers < self.low) | (numbers > self.high)
        if outside.any():
            index = int(np.argmax(outside))
            raise ColumnProblem(index, f"target {values[index]} is outside the declared [{self.low:g}, {self.high:g}]")
        return scale_declared(numbers, self.low, self.high, "symmetric").astype(np.float32)


@dataclass(frozen=True)
class TableSchema:
    """A table's declaration.

    Args:
        columns: the features, in the order they are encoded.
        label: the target column.
        names: all column names of a file without a header line, in file order; None if the file has one.
        missing: markers of a missing value.
        missing_policy: `error`; `bucket` (a category of its own, the middle of a numeric range); or `drop`
            (the row is left out, which is decided by that row alone).
        ignore: columns of the file that are not used.
        aliases: other names under which the header may list a column, as {name in the file: declared name}.
    """

    columns: tuple[Numeric | Categorical, ...]
    label: ClassLabel | NumberLabel
    names: tuple[str, ...] | None = None
    delimiter: str = ","
    comment: str | None = None
    missing: tuple[str, ...] = ("",)
    missing_policy: str = "error"
    scale: str = "unit"
    ignore: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [problem for part in (*self.columns, self.label) for problem in part.problems()]
        used = [column.name for column in self.columns] + [self.label.name]
        problems += [f"{name!r} is declared twice" for name in sorted({n for n in used if used.count(n) > 1})]
        problems += [f"{name!r} is both declared and ignored" for name in used if name in self.ignore]
        if not self.columns:
            problems.append("no feature column is declared")
        if self.names is not None and len(set(self.names)) != len(self.names):
            problems.append("names lists a column twice")
        if self.scale not in SCALES:
            problems.append(f"scale is {self.scale!r}, not one of {', '.join(SCALES)}")
        if self.missing_policy not in MISSING_POLICIES:
            problems.append(f"missing_policy is {self.missing_policy!r}, not one of {', '.join(MISSING_POLICIES)}")
        if len(self.delimiter) != 1:
            problems.append(f"delimiter is {self.delimiter!r}, not one character")
        if problems:
            raise ValueError("table schema: " + "; ".join(problems) + "\nHINT: correct the schema")

    @property
    def bucket(self) -> bool:
        return self.missing_policy == "bucket"

    @property
    def width(self) -> int:
        """Length of an encoded row."""
        return sum(column.width(self.bucket) for column in self.columns)

    @property
    def input_bound(self) -> float:
        """A column adds at most 1 to a row's squared norm: a number in [-1, 1] or a one-hot block."""
        return math.sqrt(len(self.columns))
