"""How far weights are from references to earlier ones: upper bounds on Frobenius norms, for all layers at once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

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
    is_plain_single,
    is_single,
    loops,
    scaled_norm,
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
    singles: list[int] = []
    others: list[int] = []
    for index, (weight, reference) in enumerate(zip(weights, references, strict=True)):
        if is_packed(weight, reference):
            spectral = as_matrices is not None and as_matrices[index] and weight.ndim > 1
            found[index] = _by_strips(weight, reference) if spectral else _in_one_pass(weight, reference)
        elif is_single(weight, reference):
            singles.append(index)
        elif reference.fits(weight):
            others.append(index)
    for index, norm in zip(singles, _of_singles([(weights[i], references[i]) for i in singles]), strict=True):
        found[index] = norm
    for index, square in zip(others, _squares([(weights[i], references[i]) for i in others]), strict=True):
        found[index] = _bound(weights[index], references[index], math.sqrt(square))
    return found


def vector_norms(vectors: Sequence[Tensor]) -> list[float]:
    """Upper bounds on the norms of vectors, for all of them at once."""
    if not vectors:
        return []
    margin = 1.0 + (max([v.numel() for v in vectors]) + 16) * 2.0**-52
    if all(map(is_plain_single, vectors)):
        # beside themselves, which they are subtracted from zero times
        squares = _squares_at([(v, v, v) for v in vectors], [(0.0, 0.0)] * len(vectors))
        return [math.sqrt(square) * margin for square in squares]
    norms = torch._foreach_norm([v.detach() for v in vectors], 2, dtype=torch.float64)
    return [value * margin for value in torch.stack(list(norms)).tolist()]


def _in_one_pass(weight: Tensor, reference: Reference) -> float:
    entries = weight.numel()
    totals = np.empty(-(-entries // loops().BLOCK))
    loops().add_squares.shared(threads_for(entries), weight.view(-1).numpy(), *bits(reference), totals)
    return _bound_in_float64(totals.sum(), weight, reference)


def _of_singles(pairs: Sequence[tuple[Tensor, Reference]]) -> list[float]:
    """The same beside references that are not packed, for all of them at once."""
    if not pairs:
        return []
    places, factors = [], []
    for weight, reference in pairs:
        detail = reference if reference.detail is None else reference.detail
        places.append((weight, reference.values, detail.values))
        factors.append((reference.factor, 0.0 if detail is reference else detail.factor))
    squares = _squares_at(places, factors)
    return [_bound_in_float64(square, *pair) for square, pair in zip(squares, pairs, strict=True)]


_Triple = tuple[Tensor, Tensor, Tensor]


def _squares_at(triples: Sequence[_Triple], factors: Sequence[tuple[float, float]]) -> list[float]:
    """Sums of squares of the first less the factors times the others, float32 that lies in a CPU's memory as it is."""
    count, sizes = len(triples), [first.numel() for first, _, _ in triples]
    table = [(a.data_ptr(), b.data_ptr(), c.data_ptr(), size) for (a, b, c), size in zip(triples, sizes, strict=True)]
    places, numbers = array("q", chain.from_iterable(table)), array("d", chain.from_iterable(factors))
    totals = array("d", bytes(8 * count))
    loops().add_squares_at.at(
        threads_for(sum(sizes)), places.buffer_info()[0], count, 4, numbers.buffer_info()[0], count, 2,
        *totals.buffer_info(),
    )  # fmt: skip
    return totals.tolist()


def _bound_in_float64(square: float, weight: Tensor, reference: Reference) -> float:
    norm = math.sqrt(square) * (1.0 + (weight.numel() + 16) * 2.0**-52)
    # two products and two subtractions, each rounded by 2^-53 of what it returns; without a product, one subtraction
    product = reference.values.dtype == torch.float16 or reference.factor != 1.0 or reference.detail is not None
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
