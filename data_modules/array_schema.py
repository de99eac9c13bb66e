"""Declares arrays: the shape and the range of a row's numbers, and the label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lipdp_lightning.data_modules.base import box_norm
from lipdp_lightning.data_modules.schema import ClassLabel, NumberLabel, scale_declared
from lipdp_lightning.data_modules.schema_yaml import Reader
from lipdp_lightning.data_modules.units import Grouping

_KEYS = {"rows", "shape", "low", "high", "features", "label", "group", "resize"}


@dataclass(frozen=True)
class ArraySchema:
    """Declares arrays; a number is clipped to its declared [low, high], which is mapped onto [-1, 1].

    Args:
        shape: the shape of one row.
        low: the lower end of each number, one for all or an array of that shape.
        high: the upper end.
        label: the classes, or the range of a number.
        grouping: the group of a row, if several rows belong together.
        features: the field of a record that holds the numbers, such as `image`; None where a row is a pair.
        resize: whether to scale images of another size, each by itself; otherwise they are refused.
    """

    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray
    label: ClassLabel | NumberLabel
    grouping: Grouping | None = None
    features: str | None = None
    resize: bool = False

    @property
    def input_bound(self) -> float:
        """The norm bound of a row of numbers in [-1, 1]."""
        return box_norm(self.shape, -1.0, 1.0)

    @property
    def holds_bytes(self) -> bool:
        """True if rows are bytes. The declaration decides it and no row does, since a row's bits choose its side."""
        return bool((self.low == 0).all() and (self.high == 255).all())

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Returns rows as bytes, or clipped and scaled as float32.

        Raises:
            ValueError: if a number is not finite, or is no byte where bytes are declared.
        """
        if x.dtype.kind not in "fiub":
            raise ValueError("does not hold numbers")
        if not np.isfinite(x).all():
            raise ValueError("holds a number that is not finite")
        if not self.holds_bytes:
            return scale_declared(x.astype(np.float64), self.low, self.high, "symmetric").astype(np.float32)
        if x.dtype.kind == "f" and (x != np.floor(x)).any():
            raise ValueError("holds a number that is not whole, and low: 0 with high: 255 declares bytes")
        return x if x.dtype == np.uint8 else np.clip(x, 0, 255).astype(np.uint8)

    def describe(self) -> str:
        if len({*self.low.flat}) > 1 or len({*self.high.flat}) > 1:
            return "every number in a range of its own, mapped onto [-1, 1]"
        return f"every number in [{self.low.flat[0]:g}, {self.high.flat[0]:g}], mapped onto [-1, 1]"


def _range(reader: Reader, end: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        found = np.broadcast_to(np.asarray(value, dtype=np.float64), shape)
    except (TypeError, ValueError):
        reader.problems.append(f"{end} is neither a number nor a list that fits the shape {list(shape)}")
        return np.zeros(shape)
    return np.array(found)


def _shape(reader: Reader, value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, list | tuple) else [value]
    if not given or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in given):
        reader.problems.append(f"shape is {value!r}, not a list of positive whole numbers")
        return (1,)
    return tuple(given)


def _label(reader: Reader, value: Any) -> ClassLabel | NumberLabel | None:
    entry = {"name": "label", **value} if isinstance(value, dict) else value
    if isinstance(entry, dict) and "classes" in entry:
        classes = reader.keys("label", entry, {"name", "classes"}, set())["classes"]
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
            reader.problems.append(f"label: classes is {classes!r}, not a whole number from 2")
            return None
        return ClassLabel(str(entry["name"]), tuple((str(code),) for code in range(classes)))
    return reader.label(entry)


def load_array_schema(source: str | Path | Mapping[str, Any]) -> tuple[ArraySchema, int]:
    """Returns the declaration of arrays in a YAML file, or in the content of one, and the rows that it declares."""
    reader = Reader(source, _KEYS, {"rows", "shape", "label", "low", "high"})
    top, shape = reader.top, _shape(reader, reader.top.get("shape", [1]))
    low, high = (_range(reader, end, top.get(end, default), shape) for end, default in (("low", 0), ("high", 1)))
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        reader.problems.append("low and high are not a finite range")
    label = _label(reader, top["label"]) if "label" in top else None
    features = reader.text("features", top["features"]) if "features" in top else None
    resize = reader.flag("resize", top.get("resize", False))
    reader.problems += label.problems() if label is not None else []
    reader.refuse_problems("rows, shape, low, high and label are needed; group is not")
    assert label is not None
    return ArraySchema(shape, low, high, label, reader.grouping, features, resize), reader.rows
