"""Normalisation of one example with a floored divisor (equation 5 of paper 000)."""

from __future__ import annotations

import math

from ..values import Bound, Value


def floored_normalization(x: Value, alpha: float) -> Bound:
    """(x - mean) / max(alpha, std), by group: Lipschitz 1/alpha; a group of n numbers has norm at most sqrt(n).

    Where std > alpha the Jacobian is (I - 11^T/n - u u^T/n) / std with ||u||^2 = n: norm at most 1/std < 1/alpha.
    Where std < alpha it is (I - 11^T/n) / alpha.
    """
    return Bound(min(math.sqrt(x.numel), x.norm / alpha), 1.0 / alpha)
