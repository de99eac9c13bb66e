"""References to earlier weights, rounded to half precision: a bound needs their exact values, and few bits of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Bits = npt.NDArray[np.int16]
_LARGE = 1 << 14  # entries from which memory counts
_HALF_RANGE = 14  # entries of half precision are brought below 2^14
_MODERATE = 38  # powers of two by which entries are scaled
_SAFELY_SQUARED = 1e-140
_LOST = 2.0**-62  # an entry that is lower may be lost when it is squared in float32


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the difference of two weights of this dtype is taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Reference:
    """The matrix ``factor`` times ``values``, exactly, plus that of ``detail``.

    ``frobenius`` bounds the Frobenius norm of ``values``; ``of`` is the dtype of the weights, where it is another one.
    """

    values: Tensor
    frobenius: float
    factor: float = 1.0
    of: torch.dtype | None = None
    detail: Reference | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype if self.of is None else self.of

    def dense(self) -> Tensor:
        """The matrix itself, in the dtype of the weights: exactly, where it was not scaled since it was made."""
        return self.values.to(self.dtype) * self.factor

    def fits(self, weight: Tensor) -> bool:
        """Whether a difference from this weight can be bounded: same device, dtype and shape, a moderate factor."""
        if weight.shape != self.values.shape or not 2.0**-40 <= self.factor <= 2.0**40:
            return False
        if self.detail is not None and not self.detail.fits(weight):
            return False
        return weight.device == self.values.device and weight.dtype == self.dtype

    @property
    def norm(self) -> float:
        """An upper bound on the Frobenius norm."""
        own = self.factor * self.frobenius
        return own if self.detail is None else (own + self.detail.norm) * (1.0 + 2.0**-52)

    def scaled(self, factor: float) -> Reference:
        detail = None if self.detail is None else self.detail.scaled(factor)
        return replace(self, factor=self.factor * factor, detail=detail)

    def rounding(self) -> float:
        """What rounding adds to a difference, beside an error relative to it: factor and product are rounded once each,
        and what is left before the detail is subtracted, once.
        """
        information = torch.finfo(working_dtype(self.dtype))
        smallest = information.smallest_normal * math.sqrt(self.values.numel())
        own = 0.0 if self.factor == 1.0 else 2.0 * information.eps * self.factor * self.frobenius + smallest
        if self.detail is None:
            return own
        return own + self.detail.rounding() + 2.0 * information.eps * self.detail.norm + smallest


def difference(weight: Tensor, reference: Reference) -> Tensor:
    """weight - reference, rounded; a tensor of its own."""
    dtype = working_dtype(weight.dtype)
    found = torch.sub(weight.to(dtype), reference.values.to(dtype), alpha=reference.factor)
    if reference.detail is not None:
        found.sub_(reference.detail.values.to(dtype), alpha=reference.detail.factor)
    return found


def is_packed(weight: Tensor, reference: Reference) -> bool:
    """Whether the loops of packed.py can read both, the reference as halves."""
    return _is_read_by_loops(weight, reference, torch.float16)


def is_single(weight: Tensor, reference: Reference) -> bool:
    """Whether the loops of packed.py can read both, the reference as float32."""
    return _is_read_by_loops(weight, reference, torch.float32)


def is_plain_single(values: Tensor) -> bool:
    """Whether they are float32 that lies in a CPU's memory, one after the other, and not with the other sign."""
    return values.dtype == torch.float32 and values.is_cpu and values.is_contiguous() and not values.is_neg()


def _is_read_by_loops(weight: Tensor, reference: Reference, dtype: torch.dtype) -> bool:
    values, detail = reference.values, reference.detail
    return (
        values.dtype == dtype
        and is_plain_single(weight)
        and values.is_contiguous()
        and (detail is None or (detail.values.dtype == dtype and detail.values.is_contiguous()))
        and reference.fits(weight)
    )


@lru_cache(maxsize=1)
def loops() -> ModuleType:
    """Those of packed.py, compiled when they are asked for first: not for a command that follows no weight."""
    from . import packed

    return packed


@lru_cache(maxsize=1)
def strips() -> ModuleType:
    """Those of strips.py."""
    from . import strips

    return strips


def bits(reference: Reference) -> tuple[_Bits, float, _Bits, float]:
    """Of the halves of a packed reference and of its detail, each with its factor."""
    coarse = reference.values.view(-1).view(torch.int16).numpy()
    if reference.detail is None:
        return coarse, reference.factor, coarse, 0.0
    return coarse, reference.factor, reference.detail.values.view(-1).view(torch.int16).numpy(), reference.detail.factor


def scaled_norm(values: Tensor) -> float:
    """Frobenius norm in float64, free of underflow; NaN if an entry is."""
    if values.numel() == 0:
        return 0.0
    largest = largest_entry(values)
    if largest == 0.0:  # most often: nothing has moved
        return 0.0
    return float(torch.linalg.vector_norm(values.cpu().double() / largest)) * largest


def largest_entry(values: Tensor) -> float:
    """Of the moduli; NaN if an entry is."""
    least, most = torch.aminmax(values.detach())  # a tenth of the time of a maximum norm
    return float(torch.maximum(-least, most))


def reference_of(weight: Tensor) -> Reference:
    """A copy of the weight, rounded to half precision where it is large; ``distances`` tells how far it is."""
    exponent = _exponent(weight)
    if exponent is not None:
        scaled = weight.detach() * 2.0**exponent
        return Reference(scaled.half(), half_frobenius(_by_rows(scaled), scaled.numel()), 2.0**-exponent, weight.dtype)
    values = weight.detach().clone()
    norm = float(torch.linalg.vector_norm(values.flatten(), dtype=torch.float64))
    norm = norm if norm > _SAFELY_SQUARED else scaled_norm(values)
    return Reference(values, norm * (1.0 + (values.numel() + 16) * 2.0**-52), 1.0, weight.dtype)


def half_frobenius(norm: float, entries: int) -> float:
    """What bounds the Frobenius norm of a matrix of moderate entries, rounded to halves, if ``norm`` bounds its own."""
    # of a half, beside an error relative to its entry: half of the smallest one
    return norm * (1.0 + 2.0**-10) + math.sqrt(entries) * 2.0**-25


def _by_rows(values: Tensor) -> float:
    """Upper bound on the Frobenius norm of float32 entries that are moderate: rows in float32, their sum in float64."""
    rows = torch.linalg.vector_norm(values.flatten(1) if values.ndim > 1 else values[None], dim=1).double()
    norm = float(torch.linalg.vector_norm(rows))
    return norm * (1.0 + (values.numel() // len(rows) + len(rows) + 32) * 2.0**-24) + _LOST * math.sqrt(values.numel())


def _exponent(weight: Tensor) -> int | None:
    """What brings the entries into the range of half precision; None for a weight that is kept as it is."""
    if weight.dtype != torch.float32 or weight.numel() < _LARGE:
        return None
    return half_exponent(largest_entry(weight))


def half_exponent(largest: float) -> int | None:
    """The power of two that brings ``largest`` just below 2^14; None if it is out of range, or no number."""
    if not largest < math.inf:
        return None
    exponent = _HALF_RANGE - math.frexp(largest)[1]
    return None if exponent < -_MODERATE else min(exponent, _MODERATE)


def closer(coarse: Reference, left: Tensor) -> Reference:
    """A reference that shares the memory of a coarse one, and adds ``left``, its ``difference`` from a weight."""
    return replace(coarse, detail=replace(reference_of(left), of=coarse.dtype))
