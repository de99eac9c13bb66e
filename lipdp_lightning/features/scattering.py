"""Computes scattering coefficients of wavelets (Oyallon and Mallat 2015) with kymatio."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .extractor import FeatureExtractor


class Scattering(FeatureExtractor):
    """Maps every channel to its scattering coefficients: (channels, height, width) to (channels K, height/2^J,
    width/2^J).

    K = 1 + J L + L^2 J (J - 1) / 2 with ``max_order=2``, which is 81 for J = 2 and L = 8. The arguments fix the
    wavelets; there are no weights. Scattering is 1-Lipschitz up to the filters' rounding.

    Args:
        input_shape: (channels, height, width), height and width at least 2^J.
        J: number of scales; the image shrinks by 2^J.
        L: number of angles.
        max_order: 1 or 2.
        log_offset: takes log(x + log_offset) of every coefficient, which brings first and second order to one scale;
            the mean over examples is then large and should be removed. None returns the coefficients themselves.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        J: int = 2,
        L: int = 8,
        max_order: int = 2,
        log_offset: float | None = 0.01,
    ) -> None:
        super().__init__(input_shape)
        _check(self.input_shape, J, L, max_order, log_offset)
        channels, height, width = self.input_shape
        self.J, self.L, self.max_order, self.log_offset = J, L, max_order, log_offset
        self.transform = _kymatio()(J, (height, width), L=L, max_order=max_order)
        per_channel = 1 + J * L + (L * L * J * (J - 1) // 2 if max_order == 2 else 0)
        self.freeze((channels * per_channel, height // 2**J, width // 2**J))

    def extract(self, x: Tensor) -> Tensor:
        coefficients = self.transform(x.contiguous()).flatten(1, 2)
        if self.log_offset is None:
            return coefficients
        # averages of moduli are not negative, but rounding and the mean of a negative image may be
        return torch.log(coefficients.clamp_min(0) + self.log_offset)

    def settings(self) -> dict[str, Any]:
        version = importlib.metadata.version("kymatio")
        named = {"J": self.J, "L": self.L, "max_order": self.max_order, "log_offset": self.log_offset}
        return {**named, "kymatio": version}

    def extra_repr(self) -> str:
        return f"J={self.J}, L={self.L}, max_order={self.max_order}, log_offset={self.log_offset}"


def _check(shape: tuple[int, ...], scales: int, angles: int, max_order: int, log_offset: float | None) -> None:
    problems = []
    if len(shape) != 3:
        problems.append(f"input_shape={shape} is not (channels, height, width). HINT: it takes images only")
    elif scales < 1 or 2**scales > min(shape[1:]):
        problems.append(
            f"J={scales} does not fit images of {shape[1]} x {shape[2]}. "
            "HINT: use J >= 1 with 2^J at most the height and the width"
        )
    if angles < 1 or max_order not in (1, 2):
        problems.append(
            f"L={angles}, max_order={max_order} do not exist. HINT: use L of at least 1, and max_order 1 or 2"
        )
    if log_offset is not None and not (math.isfinite(log_offset) and log_offset > 0):
        problems.append(f"log_offset={log_offset} is not positive. HINT: use 0.01, or None for no logarithm")
    if problems:
        raise ValueError("Scattering: " + "; ".join(problems))


def _kymatio() -> Any:
    try:
        # kymatio's top module imports functions that current SciPy has removed
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise ValueError(
            f"Scattering needs kymatio, which cannot be imported ({error}). HINT: pip install 'lipdp-lightning[vision]'"
        ) from error
    return ScatteringTorch2D
