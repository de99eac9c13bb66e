"""A certified norm of a dense weight, close enough to follow it between steps: one product in float32, one proof.

The smaller Gram matrix G of X is computed in float32, piece by piece along the longer side. With u = 2^-24, pieces of
length K and p of them, every entry is a sum of products in some order, K of them at a time and then p sums, so that
||G^ - G|| <= gamma ||X||_F^2 with gamma = (K + p) u / (1 - (K + p) u) (Higham 2002, section 3.5). A Cholesky
factorisation in float64 then proves a level that bounds the eigenvalues of G^ (cholesky.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cholesky import exceeding
from .gram import dense_norm
from .products import float32_products_are_exact_to_rounding
from .references import largest_entry

LONGEST_SIDE = 1024
"""Of the shorter side of matrices whose norm is best taken anew; of larger ones the change since then costs less."""

_SHORTEST_SIDE = 128  # below, an eigenvalue solver takes no longer
_PIECE = 512
_KRYLOV = 20
_EXCESS = 2.0**-6  # of the first level over what is suggested: half of it in the norm
_RANGE = 2.0**100
_UNDERFLOW = 2.0**-60  # relative to the square of the largest entry, which the eigenvalue is not below


def may_be_taken_anew(weight: Tensor) -> bool:
    """Whether :func:`close_norm` is cheap enough to follow this weight by itself."""
    return weight.ndim == 2 and min(weight.shape) <= LONGEST_SIDE


@torch.no_grad()
def close_norm(weight: Tensor) -> float:
    """Upper bound on the spectral norm of a matrix, about one percent above it.

    What rounding adds is gamma ||W||_F^2 / s(W)^2 / 2 of it: less than 2 % for 1024 equal singular values. Small
    matrices, those of other dtypes, and float32 where products may be rounded further, are measured by
    :func:`~lipdp_lightning.bounds.gram.dense_norm`.
    """
    matrix = weight.detach()
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    single = matrix.dtype == torch.float32 and float32_products_are_exact_to_rounding(matrix.device)
    if not single or rows.shape[0] < _SHORTEST_SIDE or not 1.0 / _RANGE < (largest := largest_entry(rows)) < _RANGE:
        return dense_norm(matrix)
    scale = 2.0 ** -math.frexp(largest)[1]  # a power of two: exact, and entries are below 1
    with torch.autocast(matrix.device.type, enabled=False):
        gram, terms = _gram(rows, scale)
        level = _proved(gram)
    rounding = terms * 2.0**-24
    gamma = rounding / (1.0 - rounding)
    # the diagonal of G^ is within gamma of that of G, whose sum is ||X||_F^2
    size = float(gram.diagonal().sum(dtype=torch.float64)) / (1.0 - gamma) * (1.0 + 2.0**-40)
    side = rows.shape[0]
    squared = level * (1.0 + 8.0 * side * (side + 2) * 2.0**-53) + gamma * size + _UNDERFLOW
    return math.nextafter(math.sqrt(squared) * (1.0 + 2.0**-50) / scale, math.inf)


def _gram(rows: Tensor, scale: float) -> tuple[Tensor, int]:
    """X X^T of the scaled matrix in float32, with the entries of its lower triangle above the diagonal, too; and of
    how many terms, added one after the other, an entry consists at most.
    """
    length = rows.shape[1]
    count = -(-length // _PIECE)
    longest = -(-length // count)
    total = rows.new_zeros(len(rows), len(rows))
    for start in range(0, length, longest):
        piece = rows[:, start : start + longest] * scale
        total += piece @ piece.mT
    lower = total.tril()
    return lower + lower.tril(-1).mT, longest + count


def _proved(gram: Tensor) -> float:
    """A level that bounds the eigenvalues, up to the rounding of :func:`exceeding`."""
    suggested, excess = _suggested(gram), _EXCESS
    matrices = gram.double()[None]
    ceiling = float(torch.linalg.matrix_norm(matrices))  # bounds them in any case
    while (level := suggested * (1.0 + excess)) < ceiling:
        if not bool(exceeding(matrices, level).any()):
            return level
        excess *= 2.0
    return ceiling * (1.0 + 2.0**-30)


def _suggested(gram: Tensor) -> float:
    """About the largest eigenvalue, from below, by Lanczos' method: it certifies nothing."""
    side = len(gram)
    start = torch.randn(side, generator=torch.Generator().manual_seed(0)).to(gram)
    basis = gram.new_zeros(min(_KRYLOV, side), side)
    basis[0] = start / torch.linalg.vector_norm(start)
    for index in range(1, len(basis)):
        vector = gram @ basis[index - 1]
        for _ in range(2):
            vector = vector - basis[:index].mT @ (basis[:index] @ vector)
        norm = float(torch.linalg.vector_norm(vector))
        if not norm > 0.0:
            break
        basis[index] = vector / norm
    small = (basis @ (gram @ basis.mT)).double().cpu()
    return max(float(torch.linalg.eigvalsh((small + small.mT) / 2.0)[-1]), float(gram.diagonal().max()))
