"""Bounds how far a weight W moved from an earlier one: an upper bound on s(D) for D = W - f W0, by strips of rows.

Let D_1, D_2, ... be strips of sixteen rows of D, as a matrix. From ||D x||^2 = sum_i ||D_i x||^2 follows
s(D)^2 <= sum_i s(D_i)^2, and s(D_i)^2 is the largest eigenvalue of the 16 x 16 matrix G_i = D_i D_i^T, which is at most
the sixteenth root of ||G_i^16||_F. This costs little more than to read W and W0. For noise of 512 x 3136 the bound is
3.7 times closer than ||D||_F; for a matrix of rank one it is exact, and but for rounding it is never above ||D||_F.

On a GPU, one strip has all rows, and s(D)^2 is at most the Frobenius norm of D D^T itself. That takes one product for
each weight; for noise, it is about as close as strips of sixteen rows.

Rounding, with u the unit roundoff of the precision in which D is computed, and n columns:

* D^, as computed, is within u ||D^||_F + (2 u + u^2) f ||W0||_F of D: the subtraction rounds once, and f and the
  product f W0 once each, unless f = 1.
* ||G^_i - G_i|| <= gamma ||D^_i||_F^2 with gamma = n u / (1 - n u), whatever the order of summation (Higham 2002,
  section 3.5), and ||D^_i||_F^2 <= trace(G^_i) / (1 - gamma).
* From G^_i on, which is made symmetric, all is float64. The largest eigenvalue of G^_i / trace(G^_i) is at least 1 / h
  for strips of h rows, so that its sixteenth power does not vanish; what four squarings, or one norm, err is below
  h^2 2^-50 of it. The trace is at most the root of h times ||G^_i||_F.
* What underflow takes from an entry or a product is below the smallest normal number.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import Operator

STRIP = 16
"""Rows of a strip on a CPU."""

_MODERATE = 2.0**40
_SINGLE_COLUMNS = 2**20
_SMALLEST_TRACE = 1e-299
_ONEDNN_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


@dataclass(frozen=True)
class Change:
    """Upper bounds on the spectral and on the Frobenius norm of the difference of a weight from a reference."""

    spectral: float
    frobenius: float


_ABOVE = 1.0 + 2.0**-40


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on the norms of the operators of one weight, and on its own Frobenius norm.

    ``factors`` are the operators' deviation factors for its shape.
    """

    norms: Mapping[Operator, float]
    factors: Mapping[Operator, float]
    frobenius: float

    @classmethod
    def of(cls, weight: Tensor, norms: Mapping[Operator, float], frobenius: float) -> Bounds:
        """Returns the bounds of a weight of which these norms are known."""
        return cls(norms, {operator: operator.deviation_factor(weight) for operator in norms}, frobenius)

    def moved(self, factor: float, change: Change) -> Bounds:
        """Returns bounds for ``factor`` times the weight, plus a change."""
        norms = {o: (factor * n + self.factors[o] * change.spectral) * _ABOVE for o, n in self.norms.items()}
        return Bounds(norms, self.factors, (factor * self.frobenius + change.frobenius) * _ABOVE)

    def scaled_within(self, weight: Tensor, limit: float) -> tuple[float, Bounds]:
        """Returns a factor by which the stored weight may be multiplied to be within a limit, and what then holds.

        Rounding counts: that of the factor to the weight's precision, and that of each product.
        """
        information = torch.finfo(weight.dtype)
        rounding = information.eps * (1.0 + 2.0**-20) * self.frobenius
        lost = information.smallest_normal * math.sqrt(weight.numel())
        terms = [(norm, self.factors[operator]) for operator, norm in self.norms.items()]
        factor = min(max(0.0, limit - k * lost) / (n + k * rounding) for n, k in terms) * (1.0 - 2.0**-50)
        error = factor * rounding + lost
        after = self.moved(factor, Change(error, error))
        return factor, replace(after, norms={o: min(limit, norm) for o, norm in after.norms.items()})


@dataclass(frozen=True)
class Reference:
    """The matrix ``factor`` times ``values``, an earlier weight, and the bounds that held for ``values``."""

    values: Tensor
    bounds: Bounds
    factor: float = 1.0

    def fits(self, weight: Tensor) -> bool:
        """Returns whether a difference from the weight can be bounded: same kind of tensor, a moderate factor."""
        own = self.values
        alike = weight.shape == own.shape and weight.dtype == own.dtype and weight.device == own.device
        return alike and weight.numel() > 0 and 1.0 / _MODERATE <= self.factor <= _MODERATE

    def followed(self, change: Change) -> Bounds:
        """Returns bounds for a weight that is within ``change`` of the reference."""
        return self.bounds.moved(self.factor, change)

    def within(self, bounds: Bounds, slack: float) -> bool:
        """Returns whether bounds have drifted by no more than ``slack``; NaN has drifted."""
        return all(norm <= (1.0 + slack) * self.factor * self.bounds.norms[o] for o, norm in bounds.norms.items())


Pair = tuple[Tensor, Reference]


@torch.no_grad()
def changes(pairs: Sequence[Pair], vectors: Sequence[Tensor] = ()) -> tuple[list[Change], list[float]]:
    """Returns how far weights are from references that fit them, and upper bounds on the norms of vectors.

    All are measured at once, and the host waits once. NaN propagates.
    """
    device = pairs[0][0].device if pairs else torch.device("cpu")
    assert all([weight.device == device for weight, _ in pairs]), "all weights lie on one device"
    trusted = bool(pairs) and float32_products_are_exact_to_rounding(device)
    dtypes = [_working_dtype(weight, trusted) for weight, _ in pairs]
    whole = _has_all_rows(device)
    with torch.autocast(device.type, enabled=False):
        sums = (_as_a_whole(pairs, dtypes) if whole else _by_strips(pairs, dtypes)) if pairs else []
    parts = [*sums, *(torch._foreach_norm([v.detach() for v in vectors], 2, dtype=torch.float64) if vectors else ())]
    flat = [part.flatten().to(parts[0].device) for part in parts]
    entries = iter(torch.cat(flat).tolist() if flat else [])
    moved = []
    for pair, dtype, part in zip(pairs, dtypes, flat, strict=False):
        own, rows = list(itertools.islice(entries, part.shape[0])), pair[0].shape[0]
        top, trace = _total(own[::2]), math.sqrt(rows) * own[0] if whole else _total(own[1::2])
        moved.append(_bounds(top, trace, *pair, rows if whole else STRIP, dtype))
    return moved, [norm * (1.0 + (v.numel() + 16) * 2.0**-52) for norm, v in zip(entries, vectors, strict=True)]


def _has_all_rows(device: torch.device) -> bool:
    """Returns whether one strip stands for those of sixteen rows."""
    return device.type == "cuda"


def _total(values: Sequence[float]) -> float:
    return sum(values)


def _working_dtype(weight: Tensor, trusted: bool) -> torch.dtype:
    """Returns the precision in which the change of a weight is computed."""
    single = weight.dtype != torch.float64 and weight.shape[1:].numel() <= _SINGLE_COLUMNS
    return torch.float32 if single and trusted else torch.float64


def _as_a_whole(pairs: Sequence[Pair], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
    """Returns ||D D^T||_F of every change; all differences are taken together."""
    own = [weight.detach().to(dtype) for (weight, _), dtype in zip(pairs, dtypes, strict=True)]
    scaled = torch._foreach_mul(
        [reference.values.to(dtype) for (_, reference), dtype in zip(pairs, dtypes, strict=True)],
        [reference.factor for _, reference in pairs],
    )
    rows = [change.reshape(change.shape[0], -1) for change in torch._foreach_sub(own, scaled)]
    return torch._foreach_norm([change @ change.mT for change in rows], 2, dtype=torch.float64)


def _by_strips(pairs: Sequence[Pair], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
    """Returns, for the strips of every change, a bound on the largest eigenvalue of D_i D_i^T and the trace."""
    grams = [_grams(*pair, dtype) for pair, dtype in zip(pairs, dtypes, strict=True)]
    return _eigenvalues(torch.cat(grams).double()).split([gram.shape[0] for gram in grams])


def _grams(weight: Tensor, reference: Reference, dtype: torch.dtype) -> Tensor:
    """Returns D_i D_i^T for every strip of the change, (strips, rows, rows)."""
    device = weight.device if weight.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    own, earlier = weight.detach().to(device, dtype), reference.values.to(device, dtype)
    change = torch.sub(own, earlier, alpha=reference.factor).reshape(own.shape[0], -1)
    if missing := -change.shape[0] % STRIP:
        change = F.pad(change, (0, 0, 0, missing))
    strips = change.view(-1, STRIP, change.shape[1])
    return torch.bmm(strips, strips.mT)


def _eigenvalues(grams: Tensor) -> Tensor:
    """Returns an upper bound on the largest eigenvalue of each matrix, and its trace, both as they are computed.

    The bits of each do not depend on the other matrices: roots are rounded alike everywhere, and powers are not. numpy
    takes half of torch's time for matrices that are as small as these.
    """
    symmetric = (grams.numpy() + grams.mT.numpy()) / 2.0
    traces = np.trace(symmetric, axis1=1, axis2=2)
    with np.errstate(all="ignore"):  # NaN and infinities propagate
        powers = symmetric / np.maximum(traces, _SMALLEST_TRACE)[:, None, None]
        for _ in range(4):
            powers = powers @ powers
        largest = np.sqrt(np.sqrt(np.sqrt(np.sqrt(np.sqrt(np.square(powers).sum((1, 2)))))))
    return torch.from_numpy(np.stack((traces * largest, traces), axis=1))


def _bounds(top: float, trace: float, weight: Tensor, reference: Reference, height: int, dtype: torch.dtype) -> Change:
    """Returns what follows from the sums over strips of the eigenvalues and of the traces, rounding included."""
    information = torch.finfo(dtype)
    unit, smallest = information.eps / 2.0, information.smallest_normal
    rows, columns = weight.shape[0], weight.shape[1:].numel()
    gamma = columns * unit / (1.0 - columns * unit)
    lost = -(-rows // height) * (height * columns * smallest + _SMALLEST_TRACE)
    frobenius = trace * (1.0 + 2.0**-40) / (1.0 - gamma) + lost
    spectral = (top + gamma * frobenius) * (1.0 + 2.0**-34 + height**2 * 2.0**-50) + lost
    product = 0.0 if reference.factor == 1.0 else 4.0 * unit * reference.factor * reference.bounds.frobenius
    rounding = 2.0 * unit * math.sqrt(frobenius) + product + smallest * math.sqrt(weight.numel())
    return Change((math.sqrt(spectral) + rounding) * _ABOVE, (math.sqrt(frobenius) + rounding) * _ABOVE)


def float32_products_are_exact_to_rounding(device: torch.device) -> bool:
    """Returns whether torch multiplies float32 matrices in float32 on this device; False if that is not certain.

    Global settings may let torch round the factors to TF32 or bfloat16 first. (Autocast does so, too, and is switched
    off around the products instead.)
    """
    if device.type not in ("cpu", "cuda"):
        return False
    if any(os.environ.get(name, "STRICT").upper() not in ("", "STRICT") for name in _ONEDNN_MODES):
        return False
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
    except RuntimeError:  # set through several interfaces that disagree
        return False
    backends = torch.backends
    settings = (backends, backends.mkldnn, getattr(backends.mkldnn, "matmul", None), backends.cuda.matmul)
    return all(getattr(setting, "fp32_precision", "none") in ("none", "ieee") for setting in settings)
