"""Certified upper bounds on the largest singular value of dense matrices, in float64.

Gram iteration squares Z = W^T W until its Frobenius norm is close to its spectral norm. Because
``||Z^(2^t)||_2 <= ||Z^(2^t)||_F`` holds for every t, every iterate is an upper bound on s(W); power
iteration, by contrast, approaches s(W) from below and certifies nothing.

Weights are cast to float64 (exact for bfloat16, float16 and float32). Every bound is then multiplied by
:func:`rounding_margin`, which covers the rounding of the float64 arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipdp_lightning.bounds.cholesky import largest_eigenvalue
from lipdp_lightning.bounds.products import smaller_gram

DEFAULT_ITERATIONS = 12
"""``rank ** (2 ** -(t + 2))`` is the worst ratio after t iterations: 5e-4 above the truth at rank 4096."""

_TINY = 1e-290


def rounding_margin(rows: int, columns: int) -> float:
    """Factor >= 1 that turns a norm computed in float64 into an upper bound.

    With k = max(rows, columns), r = min(rows, columns), u = 2^-53: forming the smaller Gram matrix of a
    complex matrix errs by at most 4 k u ||W||_F^2 <= 4 k r u s(W)^2, each squaring by 4 r^2 u relative to the
    top eigenvalue (halved at every further iteration, being under one more square root), a symmetric
    eigenvalue solver by 16 r u, a bound proved by Cholesky factorisation by 8 r (r + 2) u. The bound taken
    here, 4 (k r + 16 (k + r) + 16) 2^-52, exceeds their sum on s(W).
    """
    return 1.0 + 4.0 * (rows * columns + 16 * (rows + columns) + 16) * 2.0**-52


def as_float64(weight: Tensor, name: str = "weight") -> Tensor:
    """Detached float64 copy or view; refuses complex, integer and non-finite weights by name."""
    if not weight.is_floating_point():
        raise ValueError(
            f"{name} has dtype {weight.dtype}: a certified norm needs real floating-point weights.\n"
            "HINT: cast it to float32 first."
        )
    device = weight.device if weight.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    matrix = weight.detach().to(device=device)
    if matrix.numel() and not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(matrix)):
        raise ValueError(
            f"{name} contains a NaN or infinite entry: no finite bound on its norm exists, so no noise scale "
            "can make a step with it private.\n"
            "HINT: lower the learning rate, or restore the last finite checkpoint."
        )
    return matrix.to(dtype=torch.float64)


def _unit_scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix over its largest entry, so that squares neither overflow nor vanish; and that entry."""
    least, most = torch.aminmax(matrix.flatten(-2), dim=-1)
    scale = torch.maximum(-least, most)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return matrix / divisor[..., None, None], scale


def _finished(bound: Tensor, scale: Tensor, matrix: Tensor) -> Tensor:
    """Undo the scaling, add the margin; exactly 0 for zero matrices."""
    bound = bound * rounding_margin(*matrix.shape[-2:]) * scale
    # the last product may round down if it is subnormal
    above = torch.nextafter(bound, torch.full_like(bound, math.inf))
    return torch.where(scale > 0, above, torch.zeros_like(bound))


def gram_norm(matrix: Tensor, iterations: int = DEFAULT_ITERATIONS) -> Tensor:
    """Upper bounds on s(W), batched over leading dimensions, by Gram iteration (Delattre et al. 2023,
    Algorithm 1).

    Z <- (Z / ||Z||_F)^2 and r <- 2 (r + log ||Z||_F), from the smaller Gram matrix; the bound is
    ``exp((r + log ||Z||_F) 2^-(t+1))``. It holds at every t >= 0 and exceeds s(W) by at most
    ``rank ** (2 ** -(t + 2))``. A zero matrix gives exactly 0.
    """
    if iterations < 0:
        raise ValueError(f"iterations={iterations} is negative.\nHINT: 12 is within 1e-3 of the truth.")
    matrix = as_float64(matrix, "matrix")
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    matrix, scale = _unit_scaled(matrix)
    gram = smaller_gram(matrix)
    log_norm = torch.zeros_like(scale)
    for _ in range(iterations):
        frobenius = torch.linalg.matrix_norm(gram).clamp_min(_TINY)
        gram = gram / frobenius[..., None, None]
        gram = gram @ gram
        log_norm = 2.0 * (log_norm + frobenius.log())
    frobenius = torch.linalg.matrix_norm(gram).clamp_min(_TINY)
    bound = ((log_norm + frobenius.log()) * 2.0 ** -(iterations + 1)).exp()
    return _finished(bound, scale, matrix)


def spectral_norms(matrix: Tensor) -> Tensor:
    """Upper bounds on s(W), batched over leading dimensions, above it by :func:`rounding_margin` only.

    The largest eigenvalue of the smaller Gram matrix; should the solver not converge, Gram iteration.
    """
    matrix = as_float64(matrix, "matrix")
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    scaled, scale = _unit_scaled(matrix)
    try:
        squared = torch.linalg.eigvalsh(smaller_gram(scaled))[..., -1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return gram_norm(matrix)
    # after the scaling an entry of modulus 1 is attained, so the norm is at least 1
    return _finished(squared.clamp_min(1.0).sqrt(), scale, matrix)


def largest_norm(matrices: Tensor, floor: float = 0.0) -> float:
    """Upper bound on ``max(floor, s(M_1), ..., s(M_B))`` for a batch (B, m, n), real or complex, entries of
    order 1.

    At most 0.1 % above that maximum. The rounding of its arithmetic is not included: the caller adds
    :func:`rounding_margin`, which covers that of the Cholesky factorisations too.
    """
    return max(floor, math.sqrt(largest_eigenvalue(smaller_gram(matrices), floor * floor)))


def dense_norm(weight: Tensor, iterations: int | None = None, *, name: str = "weight") -> float:
    """Certified upper bound on the spectral norm of a matrix (any real dtype; bias not included).

    By default the largest eigenvalue of the smaller Gram matrix, whose only excess is :func:`rounding_margin`
    (so orthogonal matrices are exact up to it); with ``iterations`` given, Gram iteration. A zero weight
    returns 0.0. ValueError naming the weight if it is not a matrix or not finite.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: dense_norm takes a matrix.\n"
            "HINT: use conv_norm for convolution kernels, gram_norm for stacks of matrices."
        )
    matrix = as_float64(weight, name)
    return float(spectral_norms(matrix) if iterations is None else gram_norm(matrix, iterations))
