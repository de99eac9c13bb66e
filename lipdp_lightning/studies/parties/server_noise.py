"""Draws a server's noise: exact discrete Laplace variables, one for every name that a query can ask for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.discrete_noise import discrete_laplace, exact_scale
from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key


class NamedNoise:
    """Variables eta(group, index), drawn when first asked for and then kept.

    The same name is the same variable: a query asked again gets the same noise, hence is the same release. One object
    serves one session; the next session has another key, so shares of new data never meet old noise.

    Args:
        secret: 128 bits that the server drew and no one else knows.
        session: the public name of the session.
        scale: the scale of the discrete Laplace law; `noise_scale` gives it.
    """

    def __init__(self, secret: bytes, session: bytes, scale: Fraction) -> None:
        self.scale = scale
        self._stream = CounterStream(derive_key(secret, "server noise", session))
        self._drawn: dict[tuple[int, int], int] = {}

    def at(self, groups: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the variables of these names, as an array of the same shape; new ones are drawn at once."""
        names = list(zip(groups.reshape(-1).tolist(), indices.reshape(-1).tolist(), strict=True))
        new = [name for name in dict.fromkeys(names) if name not in self._drawn]
        self._drawn.update(zip(new, discrete_laplace(self._stream, len(new), self.scale).tolist(), strict=True))
        return np.array([self._drawn[name] for name in names], dtype=np.int64).reshape(indices.shape)


def noise_scale(cost: int, epsilon: float) -> Fraction:
    """Returns cost / epsilon, rounded up. Each server's noise alone makes the sum epsilon-DP."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon {epsilon} gives no noise that protects.\nHINT: give a positive number, such as 1.")
    return exact_scale(cost, epsilon)
