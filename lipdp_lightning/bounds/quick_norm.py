"""Quick upper bounds on Frobenius and spectral norms of matrices in their own precision, rounding included.

For a computed product Z of X and X^T, ||Z - X X^T|| <= gamma ||X||_F^2 with gamma = n u / (1 - n u), n the
length of the inner products and u the unit roundoff, whatever the order of summation (Higham 2002, section
3.5). Hence s(X)^2 <= s(Z) + gamma ||X||_F^2, and the same again for Z. The last factor is bounded by its
Frobenius norm, as in Gram iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .products import float32_products_are_exact_to_rounding, rows_gram

SQUARINGS = 2
"""After the first product. Of noise of 512 x 3136 the bound is then 1.2 times the norm; the Frobenius norm, 16."""

_UNDERFLOW = 2.0**-60
_RANGE = 2.0**60


def row_margin(length: int, dtype: torch.dtype) -> float:
    """Relative error of a norm whose squares are summed in ``dtype`` over ``length`` entries, with room to spare."""
    return (length + 16) * torch.finfo(dtype).eps / 2.0


def _largest_frobenius(matrices: Tensor) -> float:
    """Upper bound on the Frobenius norms of a batch (B, m, n): rows in their dtype, their sum in float64."""
    rows = torch.linalg.vector_norm(matrices, dim=-1).double()
    largest = float(torch.linalg.vector_norm(rows, dim=-1).max()) * (1.0 + (rows.shape[-1] + 8) * 2.0**-52)
    lost = torch.finfo(matrices.dtype).smallest_normal * matrices.shape[-2] * matrices.shape[-1]
    return math.hypot(largest * (1.0 + row_margin(matrices.shape[-1], matrices.dtype)), math.sqrt(lost))


def _growth(length: int, dtype: torch.dtype) -> float:
    """gamma, and what underflow can take from a product of matrices with Frobenius norm between 1/2 and 1."""
    rounding = length * torch.finfo(dtype).eps / 2.0
    return rounding / (1.0 - rounding) + _UNDERFLOW


@torch.no_grad()
def quick_norm(matrices: Tensor, strip: int | None = None) -> float:
    """Upper bound on the largest spectral norm of a batch (B, m, n), float32 or float64, in a few products.

    With ``strip``, the shorter side is cut into strips of at most as many rows, and s(X)^2 <= sum of
    s(X_i)^2: the work is that many times less, the bound for noise up to the root of that many times higher.
    The matrices are overwritten. Infinite where no bound was found: for entries that are not finite, or so
    small or large that products of them might leave the range.
    """
    factor = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    rows = factor.shape[-2]
    return norm_of_strips(torch.split(factor, rows if strip is None else strip_width(rows, strip), dim=-2))


def strip_width(rows: int, strip: int) -> int:
    """Of strips as equal as they can be, and of at most ``strip`` rows."""
    return -(-rows // -(-rows // strip))


@torch.no_grad()
def norm_of_strips(strips: Iterable[Tensor]) -> float:
    """The same for what lies between strips, with no more rows than columns each, taken one after the other."""
    return math.hypot(*(_in_own_precision(strip) for strip in strips)) * (1.0 + 2.0**-40)


def _in_own_precision(factor: Tensor) -> float:
    dtype, longest = factor.dtype, factor.shape[-1]
    if dtype == torch.float32 and (
        longest * torch.finfo(dtype).eps > 0.5 or not float32_products_are_exact_to_rounding(factor.device)
    ):
        factor = (factor.cpu() if factor.device.type == "mps" else factor).double()
    # autocast would multiply in bfloat16
    with torch.autocast(factor.device.type, enabled=False):
        return _by_squaring(factor)


def _by_squaring(factor: Tensor) -> float:
    taken: list[tuple[float, float]] = []
    for _ in range(SQUARINGS + 1):
        size = _largest_frobenius(factor)
        if not 1.0 / _RANGE < size < _RANGE:
            return math.inf
        scale = 2.0 ** -math.frexp(size)[1]  # a power of two: exact
        growth = _growth(factor.shape[-1], factor.dtype)
        factor = rows_gram(factor.mul_(scale))
        taken.append((scale, growth * (size * scale) ** 2))
    bound = _largest_frobenius(factor)
    for scale, error in reversed(taken):
        bound = math.sqrt(bound + error) * (1.0 + 2.0**-50) / scale
    return bound if math.isfinite(bound) else math.inf
