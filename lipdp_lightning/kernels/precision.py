"""Arithmetic in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64.

    A certificate allows for one rounding per operation; a layer of several operations computes in
    float32 and rounds its result once.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
