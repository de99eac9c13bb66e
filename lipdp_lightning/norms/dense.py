"""Certified upper bounds on the largest singular values of matrices, and the operator of a dense layer.

A norm is the root of the largest eigenvalue of the smaller Gram matrix, by an eigenvalue solver or by Cholesky
factorisations. If the factorisation of t I - G runs to its end in floating point, t I - G is positive semi-definite up
to a rounding error that is known beforehand (Rump 2006, BIT 46), so that t bounds the eigenvalues of G. That takes a
third of the work of one matrix product, where an eigenvalue solver takes many. Power iteration, which approaches the
norm from below and certifies nothing, only suggests the first t.

Weights are cast to float64, which is exact for bfloat16, float16 and float32. Every bound is then multiplied by
:func:`rounding_margin`, which covers the rounding of the float64 arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .operators import Operator

TOLERANCE = 2.0**-9
"""A bound is proved to within this of the largest eigenvalue, relative to it; half of that in the norm."""

_POWER_ITERATIONS = 12
_SMALLEST = 2.0**-140
"""Smaller eigenvalues are not told apart: they are far below the rounding of matrices with entries of order 1."""

_CHEAP_SIDE, _CHEAP_ENTRIES = 16, 2**14


def rounding_margin(rows: int, columns: int) -> float:
    """Returns the factor >= 1 that turns a norm computed in float64 into an upper bound.

    With k = max(rows, columns), r = min(rows, columns), u = 2^-53: forming the smaller Gram matrix of a
    complex matrix errs by at most 4 k u ||W||_F^2 <= 4 k r u s(W)^2, a symmetric eigenvalue solver by 16 r u, a bound
    proved by Cholesky factorisation by 8 r (r + 2) u. The bound taken here, 4 (k r + 16 (k + r) + 16) 2^-52, exceeds
    their sum on s(W).
    """
    return 1.0 + 4.0 * (rows * columns + 16 * (rows + columns) + 16) * 2.0**-52


def as_float64(weight: Tensor, name: str = "weight") -> Tensor:
    """Returns a detached float64 copy or view; refuses complex, integer and non-finite weights by name."""
    if not weight.is_floating_point():
        raise ValueError(
            f"{name} has dtype {weight.dtype}: a certified norm needs real floating-point weights.\n"
            "HINT: cast it to float32 first."
        )
    device = weight.device if weight.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    matrix = weight.detach().to(device=device, dtype=torch.float64)
    if not math.isfinite(float(matrix.sum())) and not bool(matrix.isfinite().all()):  # of a finite sum, all are
        raise ValueError(
            f"{name} contains a NaN or infinite entry: no finite bound on its norm exists, so no noise scale "
            "can make a step with it private.\n"
            "HINT: lower the learning rate, or restore the last finite checkpoint."
        )
    return matrix


def spectral_norms(matrices: Tensor, name: str = "matrix") -> Tensor:
    """Returns upper bounds on s(W) that exceed it by :func:`rounding_margin` only, batched over leading dimensions.

    They are roots of the largest eigenvalue of the smaller Gram matrix. Should the solver not converge, one bound on
    the eigenvalues of all matrices takes its place.
    """
    matrices = as_float64(matrices, name)
    if matrices.numel() == 0:
        return matrices.new_zeros(matrices.shape[:-2])
    least, most = torch.aminmax(matrices.flatten(-2), dim=-1)
    scale = torch.maximum(-least, most)  # so that squares neither overflow nor vanish
    gram = _smaller_gram(matrices / torch.where(scale > 0, scale, 1.0)[..., None, None])
    try:
        squared = torch.linalg.eigvalsh(gram)[..., -1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        squared = torch.full_like(scale, largest_eigenvalue(gram.reshape(-1, *gram.shape[-2:])))
    # after the scaling an entry of modulus 1 is attained, so the norm is at least 1
    bound = squared.clamp_min(1.0).sqrt() * rounding_margin(*matrices.shape[-2:]) * scale
    # the last product may round down if it is subnormal
    return torch.where(scale > 0, torch.nextafter(bound, torch.full_like(bound, math.inf)), 0.0)


def dense_norm(weight: Tensor, *, name: str = "weight") -> float:
    """Returns a certified upper bound on the spectral norm of a matrix; a bias has no part in it.

    Its only excess is :func:`rounding_margin`, so that orthogonal matrices are exact up to that. A zero weight
    returns 0.0.

    Raises:
        ValueError: If the weight, which the message names, is not a matrix, not real or not finite.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: dense_norm takes a matrix.\n"
            "HINT: use conv_norm for convolution kernels."
        )
    return float(spectral_norms(weight, name))


def largest_norm(matrices: Tensor, floor: float = 0.0) -> float:
    """Returns an upper bound on ``max(floor, s(M_1), ..., s(M_B))`` for a batch (B, m, n) with entries of order 1.

    It is at most 0.1 % above that maximum. Matrices may be complex. The rounding of the arithmetic is not included: the
    caller adds :func:`rounding_margin`, which covers that of the Cholesky factorisations too.
    """
    return max(floor, math.sqrt(largest_eigenvalue(_smaller_gram(matrices), floor * floor)))


def _smaller_gram(matrices: Tensor) -> Tensor:
    """Returns W^H W or W W^H, whichever is smaller, batched over leading dimensions."""
    rows = matrices if matrices.shape[-2] < matrices.shape[-1] else matrices.mH
    return rows @ rows.mH


def largest_eigenvalue(grams: Tensor, floor: float = 0.0) -> float:
    """Returns an upper bound on ``max(floor, s(G_1), ..., s(G_B))``, within ``TOLERANCE`` of it.

    Matrices that a level bounds need not be looked at again above it, so that the search for the smallest such
    level soon concerns few of them. The rounding of :func:`exceeding` is not included: the caller adds it.

    Args:
        grams: Hermitian, positive semi-definite matrices (B, n, n) in float64 or complex128.
        floor: The value above which eigenvalues are of interest.
    """
    upper = float(torch.linalg.matrix_norm(grams).max())  # bounds all of them, whatever the search finds
    lower = max(floor, _SMALLEST)
    if upper <= lower:
        return lower
    suggested, ceiling = _suggested(grams, _POWER_ITERATIONS), upper
    level = min(max(lower, suggested * (1.0 + TOLERANCE)), ceiling)
    lower, step = max(lower, min(suggested, level)), TOLERANCE
    suspects = grams  # all others are bounded by lower
    while upper > lower * (1.0 + TOLERANCE):
        failed = exceeding(suspects, level)
        if bool(failed.any()):
            suspects, lower, step = suspects[failed], level, 2.0 * step
        else:
            upper = level
        level = lower * (1.0 + step) if upper == ceiling else (lower + upper) / 2.0
        level = level if level < upper else (lower + upper) / 2.0
    return upper


def exceeding(grams: Tensor, level: float) -> Tensor:
    """Returns True where ``level`` could not be proved to bound the eigenvalues of a matrix of the batch (B, n, n).

    False is a proof up to rounding: then s(G) <= level (1 + 8 n (n + 2) 2^-53), complex matrices included.
    With level I - G + E = R^H R and |E| <= gamma |R^H| |R|, the norm of E is at most gamma ||R||_F^2, that is
    gamma / (1 - gamma) times the trace, which n level bounds.
    """
    shifted = grams.neg()
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    return torch.linalg.cholesky_ex(shifted)[1] != 0


def _suggested(grams: Tensor, iterations: int) -> float:
    """Returns about the largest eigenvalue, from below; the same number for the same matrices."""
    start = torch.randn(grams.shape[-1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors = start.to(grams.device, grams.dtype).expand(grams.shape[0], -1, -1)
    sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    for _ in range(iterations):
        vectors = grams @ (vectors / sizes.clamp_min(_SMALLEST))
        sizes = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return float(sizes.max())


@dataclass(frozen=True)
class Dense(Operator):
    """Applies a matrix to an example, x -> W x, at any number of positions."""

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        return dense_norm(weight, name=name)

    def deviation_factor(self, weight: Tensor) -> float:
        return 1.0

    def is_cheap(self, weight: Tensor) -> bool:
        return weight.is_cpu and min(weight.shape) <= _CHEAP_SIDE and weight.numel() <= _CHEAP_ENTRIES
