"""Computes the factors of per-example clipping: c_i of a norm n_i with c_i n_i <= R, for every n_i >= 0."""

from __future__ import annotations

import torch
from torch import Tensor

STABILIZER = 0.01  # gamma of automatic clipping


def clip_factors(norms: Tensor, radius: float, clipping: str) -> Tensor:
    """Returns c_i for norms n_i that are at least the true ones; zero where a norm is not finite.

    * local: min(1, R / n), Abadi et al. 2016;
    * global: 1 if n <= R, else 0 (paper 003, Algorithm 1, option 2);
    * automatic: R / (n + gamma), AUTO-S of Bu et al. 2022.
    """
    if clipping == "local":
        factors = radius / norms.clamp_min(radius)
    elif clipping == "global":
        factors = (norms <= radius).to(norms.dtype)
    else:
        assert clipping == "automatic", clipping
        factors = radius / (norms + STABILIZER)
    return torch.where(torch.isfinite(norms), factors, 0.0)
