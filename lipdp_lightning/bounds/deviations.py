"""How far weights are from references to earlier ones: upper bounds on Frobenius norms, for all layers at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .quick_norm import row_margin
from .references import Reference, Room, difference, scaled_norm, working_dtype

_ROW = 512
_AT_ONCE = 1 << 16  # entries, a multiple of _ROW
_CLEAR_OF_UNDERFLOW = 2.0**20


def distances(weights: Sequence[Tensor], references: Sequence[Reference]) -> list[float]:
    """Upper bounds on ||weight - reference||_F; infinite where the reference does not fit the weight.

    Squares are summed in the working dtype over rows of 512 entries, the rows in float64. The bounds are multiplied by
    more than the rounding of the subtraction and of both sums; where squares may have underflowed, the norm is taken
    again in float64. The host waits once for each device.
    """
    fitting = [reference.fits(weight) for weight, reference in zip(weights, references, strict=True)]
    squares = _squares([(w, r) for w, r, fits in zip(weights, references, fitting, strict=True) if fits])
    return [
        _bound(weight, reference, math.sqrt(next(squares))) if fits else math.inf
        for weight, reference, fits in zip(weights, references, fitting, strict=True)
    ]


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
        rows[index] = _row_norms(weight, reference)
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


def _row_norms(weight: Tensor, reference: Reference) -> Tensor:
    """Norms of rows of the difference, on a CPU some rows at a time: no copy as large as the weight is ever held."""
    pieces = reference.pieces(_AT_ONCE) if weight.device.type == "cpu" and weight.is_contiguous() else None
    if pieces is None:
        return _norms(difference(weight, reference).reshape(-1))
    flat = torch.split(weight.view(-1), _AT_ONCE)
    room = Room(_AT_ONCE, working_dtype(weight.dtype))
    return torch.cat([_norms(room.difference(part, of)) for part, of in zip(flat, pieces, strict=True)])


def _norms(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % _ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)] if whole else []
    if whole < flat.numel() or not norms:
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return norms[0] if len(norms) == 1 else torch.cat(norms)
