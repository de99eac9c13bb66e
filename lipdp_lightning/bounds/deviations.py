"""How far weights are from copies kept of them: upper bounds on Frobenius norms, for all layers at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .quick_norm import row_margin

_ROW = 512
_AT_ONCE = 1 << 18  # entries, a multiple of _ROW
_CLEAR_OF_UNDERFLOW = 2.0**20
_SAFELY_SQUARED = 1e-140


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the difference of two weights of this dtype is taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Reference:
    """The matrix ``factor`` times ``values``, exactly; ``frobenius`` bounds the Frobenius norm of ``values``."""

    values: Tensor
    frobenius: float
    factor: float = 1.0

    def fits(self, weight: Tensor) -> bool:
        """Whether a difference from this weight can be bounded: same device, dtype and shape, a moderate factor."""
        if weight.shape != self.values.shape or not 2.0**-40 <= self.factor <= 2.0**40:
            return False
        return weight.device == self.values.device and weight.dtype == self.values.dtype

    def rounding(self) -> float:
        """What rounding adds to a difference, beside a relative error: factor and product are rounded once each."""
        if self.factor == 1.0:
            return 0.0
        information = torch.finfo(working_dtype(self.values.dtype))
        smallest = information.smallest_normal * math.sqrt(self.values.numel())
        return 2.0 * information.eps * self.factor * self.frobenius + smallest


def difference(weight: Tensor, reference: Reference) -> Tensor:
    """weight - factor * values, rounded; a tensor of its own."""
    own = weight.to(working_dtype(weight.dtype))
    if own is not weight:
        return own.sub_(reference.values, alpha=reference.factor)
    return torch.sub(weight, reference.values, alpha=reference.factor)


def distances(weights: Sequence[Tensor], references: Sequence[Reference]) -> list[float]:
    """Upper bounds on ||weight - factor * values||_F; infinite where the reference does not fit the weight.

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
    norm = value if value >= clear else _scaled_norm(difference(weight, reference))
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
    plain = weight.is_contiguous() and reference.values.is_contiguous()
    if weight.device.type != "cpu" or not plain or weight.numel() <= _AT_ONCE:
        return _norms(difference(weight, reference).reshape(-1))
    flat = (torch.split(tensor.view(-1), _AT_ONCE) for tensor in (weight, reference.values))
    return torch.cat([_norms(difference(w, replace(reference, values=v))) for w, v in zip(*flat, strict=True)])


def _norms(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % _ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)] if whole else []
    if whole < flat.numel() or not norms:
        norms.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _scaled_norm(values: Tensor) -> float:
    """Frobenius norm in float64, free of underflow; NaN if an entry is."""
    if values.numel() == 0:
        return 0.0
    least, most = torch.aminmax(values)
    largest = float(torch.maximum(-least, most))
    if largest == 0.0:  # most often: nothing has moved
        return 0.0
    return float(torch.linalg.vector_norm(values.cpu().double() / largest)) * largest


def reference_of(weight: Tensor) -> Reference:
    """A copy of the weight as it is."""
    values = weight.detach().clone()
    norm = float(torch.linalg.vector_norm(values.flatten(), dtype=torch.float64))
    norm = norm if norm > _SAFELY_SQUARED else _scaled_norm(values)
    return Reference(values, norm * (1.0 + (values.numel() + 16) * 2.0**-52))
