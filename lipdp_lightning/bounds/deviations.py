"""How far weights are from references to earlier ones: upper bounds on Frobenius norms, for all layers at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..threads import threads_for
from .quick_norm import row_margin
from .references import (
    Reference,
    bits,
    difference,
    is_packed,
    is_single,
    loops,
    scaled_norm,
    singles,
    strips,
    working_dtype,
)

_ROW = 512
_CLEAR_OF_UNDERFLOW = 2.0**20


def distances(
    weights: Sequence[Tensor], references: Sequence[Reference], as_matrices: Sequence[bool] | None = None
) -> list[float]:
    """Upper bounds on ||weight - reference||_F; infinite where the reference does not fit the weight.

    Where a float32 weight and its reference lie in a CPU's memory, one compiled loop reads both, in float64. Of large
    ones that ``as_matrices`` names, the bound is then on the spectral norm of the difference, flattened to a matrix of
    as many rows, and its Frobenius norm is at most sqrt(8) times what is returned. Elsewhere squares are summed in the
    working dtype over rows of 512 entries, the rows in float64. The bounds are multiplied by more than the rounding of
    the subtraction and of both sums; where squares may have underflowed, the norm is taken again in float64. The host
    waits once for each device.
    """
    found = [math.inf] * len(weights)
    others: list[int] = []
    for index, (weight, reference) in enumerate(zip(weights, references, strict=True)):
        if is_packed(weight, reference):
            spectral = as_matrices is not None and as_matrices[index] and weight.ndim > 1
            found[index] = _by_strips(weight, reference) if spectral else _in_one_pass(weight, reference)
        elif is_single(weight, reference):
            found[index] = _in_one_pass(weight, reference, packed=False)
        elif reference.fits(weight):
            others.append(index)
    for index, square in zip(others, _squares([(weights[i], references[i]) for i in others]), strict=True):
        found[index] = _bound(weights[index], references[index], math.sqrt(square))
    return found


def _in_one_pass(weight: Tensor, reference: Reference, packed: bool = True) -> float:
    entries = weight.numel()
    totals = np.empty(-(-entries // loops().BLOCK))
    loop = loops().add_squares if packed else loops().add_squares_beside_singles
    values = bits(reference) if packed else singles(reference)
    loop.shared(threads_for(entries), weight.view(-1).numpy(), *values, totals)
    norm = math.sqrt(totals.sum()) * (1.0 + (entries + 16) * 2.0**-52)
    # two products and two subtractions, each rounded by 2^-53 of what it returns; without a product, one subtraction
    product = packed or reference.factor != 1.0 or reference.detail is not None
    return norm + 2.0**-50 * (norm + (reference.norm if product else 0.0))


def _by_strips(weight: Tensor, reference: Reference) -> float:
    rows, columns = weight.shape[0], weight[0].numel()
    squares = np.empty(-(-rows // strips().ROWS))
    coarse, factor, detail, factor_of_detail = bits(reference)
    values, halves, more = (m.reshape(rows, columns) for m in (weight.view(-1).numpy(), coarse, detail))
    strips().square_norms.shared(threads_for(rows * columns), values, halves, factor, more, factor_of_detail, squares)
    # an entry of a small Gram matrix errs by columns 2^-53 of ||D_i||_F^2 <= 8 ||D_i||_2^2, and its powers by less
    norm = math.sqrt(squares.sum()) * (1.0 + (columns + len(squares) + 1024) * 2.0**-49)
    return norm + 2.0**-48 * (norm + reference.norm)


def _bound(weight: Tensor, reference: Reference, value: float) -> float:
    information = torch.finfo(working_dtype(weight.dtype))
    clear = math.sqrt(information.smallest_normal * weight.numel()) * _CLEAR_OF_UNDERFLOW
    # so written that NaN is measured again
    norm = value if value >= clear else scaled_norm(difference(weight, reference))
    margin = row_margin(_ROW, working_dtype(weight.dtype)) + (weight.numel() + 16) * 2.0**-52 + 2.0**-39
    return norm * (1.0 + margin) + reference.rounding()


def _squares(pairs: Sequence[tuple[Tensor, Reference]]) -> Iterator[float]:
    """The squared norm of each difference, added in float64 from its rows."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    rows: dict[int, Tensor] = {}
    for index, (weight, reference) in enumerate(pairs):
        rows[index] = _norms(difference(weight, reference).reshape(-1))
        places.setdefault((weight.device, rows[index].dtype), []).append(index)
    found = [0.0] * len(pairs)
    for owners in places.values():
        together = torch.cat([rows[index] for index in owners]).cpu().double().square_()
        counts = torch.tensor([len(rows[index]) for index in owners])
        sums = torch.zeros(len(owners), dtype=torch.float64)
        sums.index_add_(0, torch.repeat_interleave(torch.arange(len(owners)), counts), together)
        for index, value in zip(owners, sums.tolist(), strict=True):
            found[index] = value
    return iter(found)


def _norms(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % _ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)] if whole else []
    if whole < flat.numel() or not norms:
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return norms[0] if len(norms) == 1 else torch.cat(norms)
