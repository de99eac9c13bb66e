"""Numbers made from the batch size, which is private, as exact multiples of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchNumber:
    """``factor`` times the batch size at every batch size; with no factor, any other number made from it.

    Arithmetic that gives a multiple of the batch size, or a public number, at every batch size is carried out. All
    other arithmetic raises a TypeError.
    """

    factor: int | None

    def at(self, batch: int) -> int | None:
        """Returns the number at this batch size, or None where it is not known."""
        return None if self.factor is None else self.factor * batch

    def __mul__(self, other: object) -> BatchNumber | int:
        if self.factor is None or not isinstance(other, int):
            return NotImplemented
        return _multiple(self.factor * other)

    __rmul__ = __mul__

    def __add__(self, other: object) -> BatchNumber | int:
        theirs = _factor(other)
        return NotImplemented if self.factor is None or theirs is None else _multiple(self.factor + theirs)

    def __sub__(self, other: object) -> BatchNumber | int:
        theirs = _factor(other)
        return NotImplemented if self.factor is None or theirs is None else _multiple(self.factor - theirs)

    def __neg__(self) -> BatchNumber | int:
        return self * -1

    def __pos__(self) -> BatchNumber | int:
        return self * 1

    def __floordiv__(self, other: object) -> BatchNumber | int:
        """Divides where nothing remains."""
        divisor = other if isinstance(other, int) else _factor(other)
        if self.factor is None or not divisor or self.factor % divisor:
            return NotImplemented
        quotient = self.factor // divisor
        return _multiple(quotient) if isinstance(other, int) else quotient

    def __truediv__(self, other: object) -> float:
        divisor = _factor(other)
        return NotImplemented if self.factor is None or not divisor else self.factor / divisor


def _factor(value: object) -> int | None:
    return value.factor if isinstance(value, BatchNumber) else None


def _multiple(factor: int) -> BatchNumber | int:
    return BatchNumber(factor) if factor else 0


UNKNOWN = BatchNumber(None)


def counts_examples(value: object) -> bool:
    """Whether a number, or a number inside a tuple or a slice, is made from the batch size."""
    if isinstance(value, slice):
        return any(map(counts_examples, (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return any(map(counts_examples, value))
    return isinstance(value, BatchNumber)


def at_batch(value: object, batch: int) -> object:
    """Returns the value as forward sees it at this batch size."""
    if isinstance(value, tuple | list):
        return tuple(at_batch(v, batch) for v in value)
    return value.at(batch) if isinstance(value, BatchNumber) else value
