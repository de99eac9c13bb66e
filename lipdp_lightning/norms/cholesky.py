"""Upper bounds on the largest eigenvalue of a batch of Gram matrices, proved by Cholesky factorisations.

If the Cholesky factorisation of t I - G runs to its end in floating point, t I - G is positive semi-definite
up to a rounding error that is known beforehand (Rump 2006, BIT 46), so that t bounds the eigenvalues of G. That
takes a third of the work of one matrix product, where an eigenvalue solver or Gram iteration takes many. Power
iteration, which certifies nothing, only suggests the first t.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 2.0**-9
"""A bound is proved to within this of the largest eigenvalue, relative to it; half of that in the norm."""

_POWER_ITERATIONS = 12
_SMALLEST = 2.0**-140
"""Eigenvalues below are not told apart: far below the rounding of matrices with entries of order 1."""


def exceeding(grams: Tensor, level: float) -> Tensor:
    """True where ``level`` could not be proved to bound the eigenvalues of a matrix of the batch (B, n, n).

    False is a proof up to rounding: then s(G) <= level (1 + 8 n (n + 2) 2^-53), complex matrices included.
    With level I - G + E = R^H R and |E| <= gamma |R^H| |R|, the norm of E is at most gamma ||R||_F^2, that is
    gamma / (1 - gamma) times the trace, which n level bounds.
    """
    shifted = grams.neg()
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    return torch.linalg.cholesky_ex(shifted)[1] != 0


def _suggested(grams: Tensor, iterations: int) -> float:
    """About the largest eigenvalue, from below; the same number for the same matrices."""
    start = torch.randn(grams.shape[-1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors = start.to(grams.device, grams.dtype).expand(grams.shape[0], -1, -1)
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    for _ in range(iterations):
        vectors = grams @ (vectors / sizes.clamp_min(_SMALLEST))
        sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return float(sizes.max())


def largest_eigenvalue(
    grams: Tensor, floor: float = 0.0, tolerance: float = TOLERANCE, iterations: int = _POWER_ITERATIONS
) -> float:
    """Upper bound on ``max(floor, s(G_1), ..., s(G_B))`` for Hermitian positive semi-definite float64 or
    complex128 matrices (B, n, n), within ``tolerance`` of it.

    Matrices that a level bounds need not be looked at again above it, so that the search for the smallest such
    level soon concerns few of them. The rounding of :func:`exceeding` is not included: the caller adds it.
    """
    upper = float(torch.linalg.matrix_norm(grams).max())  # bounds all of them, whatever the search finds
    lower = max(floor, _SMALLEST)
    if upper <= lower:
        return lower
    suggested, ceiling = _suggested(grams, iterations), upper
    level = min(max(lower, suggested * (1.0 + tolerance)), ceiling)
    lower, step = max(lower, min(suggested, level)), tolerance
    suspects = grams  # all others are bounded by lower
    while upper > lower * (1.0 + tolerance):
        failed = exceeding(suspects, level)
        if bool(failed.any()):
            suspects, lower, step = suspects[failed], level, 2.0 * step
        else:
            upper = level
        level = lower * (1.0 + step) if upper == ceiling else (lower + upper) / 2.0
        level = level if level < upper else (lower + upper) / 2.0
    return upper
