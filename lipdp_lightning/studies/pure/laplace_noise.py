"""Releases sums of gradients with Laplace noise per layer, under one epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.curves.discrete_noise import NoiseSource, discrete_laplace, exact_scale
from lipdp_lightning.studies.pure.absolute_sums import AbsoluteBound
from lipdp_lightning.studies.pure.mixed_ledger import LAPLACE, SUBSAMPLED_LAPLACE, PureEntry, mixed_epsilon

_ROUNDING = 2.0**-10  # the share of a sensitivity that rounding sums to the grid may add


def laplace_scales(bounds: Sequence[AbsoluteBound], multiplier: float) -> dict[str, float]:
    """Returns the scale b_k of every layer, with sum_k Delta_k / b_k = 1 / multiplier.

    Under this condition one example changes the log-density of all releases together by at most 1 / multiplier, which
    is the epsilon of one step. Of the scales that meet it, b_k proportional to (Delta_k / n_k)^(1/3) have the least
    total variance, 2 sum_k n_k b_k^2. A Delta_k includes what rounding to the grid of `grid_steps` adds.
    """
    if not (multiplier > 0 and math.isfinite(multiplier)):
        raise ValueError(f"multiplier {multiplier} is not a positive number. HINT: use 1 / epsilon of one step.")
    deltas = {b.name: b.sizes.total * (1 + _ROUNDING) for b in bounds}
    if not all(math.isfinite(d) and d > 0 for d in deltas.values()):
        raise ValueError(f"l1 sensitivities {deltas} are not all positive numbers. HINT: bound weights and inputs.")
    shares = {b.name: (deltas[b.name] / b.numel) ** (1 / 3) for b in bounds}
    total = math.fsum(deltas[name] / share for name, share in shares.items())
    return {name: multiplier * share * total for name, share in shares.items()}


def grid_steps(bounds: Sequence[AbsoluteBound]) -> dict[str, float]:
    """Returns the grid that each layer's sum is rounded to, a power of two.

    Rounding moves each of n coordinates of two neighbouring sums apart by at most one step, and n steps are at most
    2^-10 of the sensitivity.
    """
    return {b.name: 2.0 ** math.floor(math.log2(b.sizes.total * _ROUNDING / b.numel)) for b in bounds}


def laplace_release(
    sums: Mapping[str, Sequence[Tensor]], bounds: Sequence[AbsoluteBound], multiplier: float, source: NoiseSource
) -> dict[str, list[Tensor]]:
    """Returns each layer's summed gradients with exact discrete Laplace noise of its scale.

    Sums are rounded to a public grid, on which the noise is drawn exactly; no bit of the result depends on how a
    floating point number was formed.
    """
    scales, steps = laplace_scales(bounds, multiplier), grid_steps(bounds)
    found: dict[str, list[Tensor]] = {}
    for bound in bounds:
        step = steps[bound.name]
        scale = exact_scale(Fraction(scales[bound.name]) / Fraction(step), 1.0)
        found[bound.name] = [_released(part, step, scale, source) for part in sums[bound.name]]
    return found


def _released(sums: Tensor, step: float, scale: Fraction, source: NoiseSource) -> Tensor:
    if sums.dtype != torch.float64:
        raise ValueError(f"a sum is in {sums.dtype}, whose rounding has no margin. HINT: use float64.")
    whole = np.rint(sums.detach().numpy().reshape(-1) / step)
    assert np.all(np.abs(whole) < 2.0**52), "a sum that is not finite, or too large for its grid"
    noisy = whole.astype(np.int64) + discrete_laplace(source.stream(), whole.size, scale)
    return torch.from_numpy(noisy * step).reshape(sums.shape)


def laplace_entry(multiplier: float, sample_rate: float, steps: int, label: str = "Laplace noise") -> PureEntry:
    """Returns the ledger's entry of releases with scales of `laplace_scales`."""
    name = LAPLACE if sample_rate == 1 else SUBSAMPLED_LAPLACE
    return PureEntry(name, multiplier, sample_rate, steps, label)


def laplace_multiplier(epsilon: float, delta: float, count: int = 1, sample_rate: float = 1.0) -> float:
    """Returns the least Laplace multiplier, to 0.1 %, of `count` releases that are (epsilon, delta)-DP for add/remove.

    At delta 0, which needs every example in every release, it is count / epsilon.
    """
    if delta == 0 and sample_rate == 1:
        return count / epsilon
    name = LAPLACE if sample_rate == 1 else SUBSAMPLED_LAPLACE

    def met(multiplier: float) -> bool:
        return mixed_epsilon([PureEntry(name, multiplier, sample_rate, count)], delta) <= epsilon

    high = 1.0
    while not met(high):
        high *= 2
    low = high / 2
    while met(low):
        low, high = low / 2, low
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return high
