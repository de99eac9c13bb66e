"""How far weights are from copies kept of them: upper bounds on Frobenius norms, for all layers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .quick_norm import row_margin

_ROW = 512
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


@dataclass(frozen=True)
class _Slot:
    key: tuple[torch.device, torch.dtype]
    start: int
    shape: torch.Size


class Deviations:
    """One buffer per device and dtype, where differences of weights from references are written and measured.

    Squares are summed in the buffer's dtype over rows of 512 entries, the rows in float64. The bounds are
    multiplied by more than the rounding of the subtraction and of both sums; where squares may have
    underflowed, the norm is taken again in float64.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        rows: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self._slots: list[_Slot] = []
        for index, weight in enumerate(weights):
            key = (weight.device, working_dtype(weight.dtype))
            owners = rows.setdefault(key, [])
            self._slots.append(_Slot(key, len(owners) * _ROW, weight.shape))
            owners.extend([index] * -(-weight.numel() // _ROW))
        self._owners = {key: torch.tensor(owners, dtype=torch.int64) for key, owners in rows.items()}
        self._buffers = {
            key: torch.zeros(len(owners) * _ROW, device=key[0], dtype=key[1]) for key, owners in rows.items()
        }

    def holds(self, index: int, weight: Tensor) -> bool:
        slot = self._slots[index]
        return slot.key == (weight.device, working_dtype(weight.dtype)) and slot.shape == weight.shape

    def difference(self, index: int, weight: Tensor, reference: Reference) -> Tensor:
        """weight - factor * values, rounded: a view of the buffer, good until the next difference is written."""
        slot = self._slots[index]
        count = slot.shape.numel()
        view = self._buffers[slot.key][slot.start : slot.start + count].view(slot.shape)
        if weight.dtype == view.dtype:
            return torch.sub(weight, reference.values, alpha=reference.factor, out=view)
        return view.copy_(weight).sub_(reference.values, alpha=reference.factor)

    def measure(self, weights: Sequence[Tensor], references: Sequence[Reference]) -> list[float]:
        """Upper bounds on ||weight - factor * values||_F; infinite where the reference does not fit the weight."""
        fitting = [reference.fits(weight) for weight, reference in zip(weights, references, strict=True)]
        views = [
            self.difference(index, weight, reference) if fits else None
            for index, (weight, reference, fits) in enumerate(zip(weights, references, fitting, strict=True))
        ]
        squares = torch.zeros(len(weights), dtype=torch.float64)
        for key, buffer in self._buffers.items():
            rows = torch.linalg.vector_norm(buffer.view(-1, _ROW), dim=1).cpu()
            squares.index_add_(0, self._owners[key], rows.double().square_())
        bounds = []
        for value, view, reference in zip(squares.sqrt_().tolist(), views, references, strict=True):
            if view is None:
                bounds.append(math.inf)
                continue
            information = torch.finfo(view.dtype)
            clear = math.sqrt(information.smallest_normal * view.numel()) * _CLEAR_OF_UNDERFLOW
            norm = value if value >= clear else _scaled_norm(view)
            margin = row_margin(_ROW, view.dtype) + (view.numel() + 16) * 2.0**-52 + 2.0**-39
            bounds.append(norm * (1.0 + margin) + reference.rounding())
        return bounds


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
