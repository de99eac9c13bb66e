"""Writes bounds as text, never on the safe-looking side of the computed value.

A printed epsilon is the cost that a reader relies on. Rounding to the nearest number of a few digits makes half of them
too small, so every epsilon that is written for a reader goes through this module (tests/test_printed_epsilons.py).
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_KEPT = 15  # digits; the bits behind them are rounding errors, so that 3.0000000000000004 is written as 3


def upper_text(value: float, digits: int = 4) -> str:
    """Returns a number of at most ``digits`` significant digits that is not below the value.

    Integers below 1e7 and numbers of more digits before the point than ``digits`` are written without an exponent.
    """
    return _text(value, digits, ROUND_CEILING)


def lower_text(value: float, digits: int = 4) -> str:
    """Returns a number of at most ``digits`` significant digits that is not above the value, for lower bounds."""
    return _text(value, digits, ROUND_FLOOR)


class ShownBound(float):
    """An upper bound that is written rounded up even by code that formats numbers itself, such as a progress bar."""

    def __str__(self) -> str:
        return upper_text(self)

    def __format__(self, specification: str) -> str:
        return upper_text(self)


def _text(value: float, digits: int, rounding: str) -> str:
    number = float(value)
    if not math.isfinite(number):
        return "nan" if math.isnan(number) else ("inf" if number > 0 else "-inf")
    if number == 0:
        return "0"
    exact = Decimal(f"{number:.{_KEPT}g}")
    whole = digits <= exact.adjusted() < 7  # a number of more digits before the point is written out
    unit = Decimal(1) if whole else Decimal(1).scaleb(exact.adjusted() - digits + 1)
    rounded = exact.quantize(unit, rounding=rounding)
    if rounded == rounded.to_integral_value() and abs(rounded) < 10_000_000:
        return str(int(rounded))
    return f"{float(rounded):.{digits}g}"
