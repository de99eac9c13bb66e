"""Counts exactly, axis by axis, which input pixel each (output, tap) pair of a convolution reads.

Padding of every mode torch offers maps each padded position to one input pixel or, for zeros, to none, and does so axis
by axis. The number of pairs that read a pixel is therefore the product over axes of one-dimensional counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Axis:
    """Describes one spatial axis; the size of the input is None if it is not known."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    mode: str
    size: int | None

    @property
    def span(self) -> int:
        """The length of the dilated kernel."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def known_size(self) -> int:
        if self.size is None:
            raise ValueError(
                f"padding_mode={self.mode!r}, stride {self.stride}, padding {(self.before, self.after)}: how "
                "often a pixel is read depends on the input size, which was not given.\n"
                "HINT: pass input_size, or use zero padding."
            )
        return self.size

    @property
    def padded(self) -> int:
        return self.known_size + self.before + self.after

    @property
    def outputs(self) -> int:
        return (self.padded - self.span) // self.stride + 1

    def sources(self) -> Tensor:
        """Returns for every padded position the input pixel that it copies, or -1 for a zero."""
        size = self.known_size
        position = torch.arange(-self.before, size + self.after)
        if self.mode == "zeros":
            return torch.where((position >= 0) & (position < size), position, -1)
        if self.mode == "circular":
            return position % size
        if self.mode == "replicate":
            return position.clamp(0, size - 1)
        return (size - 1) - ((size - 1) - position.abs()).abs()

    def reads(self) -> Tensor:
        """Returns for every input pixel the number of (output, tap) pairs that read it."""
        outputs = torch.arange(self.outputs)[:, None] * self.stride
        taps = torch.arange(self.kernel)[None, :] * self.dilation
        read = self.sources()[outputs + taps]
        return torch.bincount(read[read >= 0], minlength=self.known_size)

    def max_reads(self) -> int:
        """Returns the largest entry of :meth:`reads`; for zero padding of unknown size, the supremum over sizes.

        Pairs (t, j) with s t + d j fixed have j in one residue class modulo s / gcd(s, d).
        """
        if self.size is None and (self.mode == "zeros" or self.before == self.after == 0):
            return -(-self.kernel * math.gcd(self.stride, self.dilation) // self.stride)
        return int(self.reads().max())

    def max_copies(self) -> int:
        """Returns the largest number of padded positions that hold one input pixel: s(padding)^2, exactly."""
        if self.mode == "zeros" or self.before == self.after == 0:
            return 1
        sources = self.sources()
        return int(torch.bincount(sources[sources >= 0]).max())


def _per_axis(value: Sizes, count: int, name: str, least: int) -> tuple[int, ...]:
    values = (value,) * count if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) == 1:
        values = values * count
    if len(values) != count or min(values) < least:
        raise ValueError(
            f"{name}={value!r}: expected one or {count} integers, none below {least}.\n"
            f"HINT: give {name} as torch.nn.Conv2d takes it."
        )
    return values


def _padding_pairs(
    padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        if padding == "valid":
            return [(0, 0)] * len(kernel)
        if padding != "same" or any(s != 1 for s in stride):
            raise ValueError(
                f"padding={padding!r} with stride {tuple(stride)}: only 'valid', and 'same' at stride 1.\n"
                "HINT: give the padding as integers."
            )
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]  # torch puts the odd one after
    if not isinstance(padding, int) and all(not isinstance(p, int) for p in padding):
        pairs = [tuple(_per_axis(p, 2, "padding", 0)) for p in padding]
        if len(pairs) != len(kernel):
            raise ValueError(f"padding={padding!r}: one pair per axis is needed.\nHINT: or give integers.")
        return [(before, after) for before, after in pairs]
    return [(p, p) for p in _per_axis(padding, len(kernel), "padding", 0)]  # type: ignore[arg-type]


def convolution_axes(
    kernel_size: Sizes,
    stride: Sizes = 1,
    dilation: Sizes = 1,
    padding: Padding = 0,
    padding_mode: str = "zeros",
    input_size: Sizes | None = None,
) -> tuple[Axis, ...]:
    """Returns the axes of a convolution as torch.nn.Conv1d and Conv2d read the same arguments.

    ``padding`` also takes one (before, after) pair per axis. An int ``kernel_size`` means one axis.

    Raises:
        ValueError: If torch would refuse the arguments.
    """
    kernel = (kernel_size,) if isinstance(kernel_size, int) else tuple(int(k) for k in kernel_size)
    kernel = _per_axis(kernel, len(kernel), "kernel_size", 1)
    strides = _per_axis(stride, len(kernel), "stride", 1)
    dilations = _per_axis(dilation, len(kernel), "dilation", 1)
    pairs = _padding_pairs(padding, kernel, strides, dilations)
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode={padding_mode!r} is not one of {PADDING_MODES}.\nHINT: use 'zeros'.")
    sizes: Sequence[int | None] = [None] * len(kernel)
    if input_size is not None:
        sizes = _per_axis(input_size, len(kernel), "input_size", 1)
    axes = tuple(
        Axis(k, s, d, before, after, padding_mode, size)
        for k, s, d, (before, after), size in zip(kernel, strides, dilations, pairs, sizes, strict=True)
    )
    for axis in axes:
        _check_axis(axis)
    return axes


def _check_axis(axis: Axis) -> None:
    if axis.size is None:
        return
    if axis.outputs < 1:
        raise ValueError(
            f"an input of {axis.size} padded by ({axis.before}, {axis.after}) is shorter than the dilated "
            f"kernel, {axis.span}: the convolution has no output.\nHINT: check input_size and padding."
        )
    widest = max(axis.before, axis.after)
    limit = {"reflect": axis.size - 1, "circular": axis.size}.get(axis.mode, widest)
    if widest > limit:
        raise ValueError(
            f"padding_mode={axis.mode!r} cannot pad an input of {axis.size} by {widest}.\n"
            f"HINT: pad by at most {limit}, or use zero padding."
        )


def output_size(*geometry: Any, **named: Any) -> tuple[int, ...]:
    """Returns the spatial size of the output; the arguments are those of :func:`convolution_axes`."""
    return tuple(axis.outputs for axis in convolution_axes(*geometry, **named))


def root_above(integer: int) -> float:
    """Returns the square root, exact for perfect squares and rounded up otherwise."""
    exact = math.isqrt(integer)
    return float(exact) if exact * exact == integer else math.nextafter(math.sqrt(integer), math.inf)


def kappa_of(axes: Sequence[Axis]) -> float:
    """Returns kappa of the axes; see :func:`kappa`."""
    return root_above(math.prod(axis.max_reads() for axis in axes))


def kappa(*geometry: Any, **named: Any) -> float:
    """Returns kappa, with kappa^2 the largest number of (output, tap) pairs that read one input pixel.

    Then ||patches(x)||_F <= kappa ||x||, so s(conv) <= kappa s(kernel as c_out x (c_in k_h k_w)). The arguments are
    those of :func:`convolution_axes`. With ``input_size`` the count is exact, for every padding mode. Without it, zero
    padding gives the supremum over sizes, the product over axes of ceil(k gcd(s, d) / s), and any other mode that does
    pad is a ValueError.
    """
    return _kappa(*map(_hashable, geometry), **{name: _hashable(value) for name, value in named.items()})


@lru_cache(maxsize=1024)
def _kappa(*geometry: Any, **named: Any) -> float:
    """Computes kappa once per geometry, since a certificate asks for that of every convolution at every step."""
    return kappa_of(convolution_axes(*geometry, **named))


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str) else tuple(map(_hashable, value))


def coverage(*geometry: Any, dtype: torch.dtype = torch.float64, **named: Any) -> Tensor:
    """Returns how often each input pixel is read; shape ``input_size``. Its maximum is kappa^2.

    ||patches(x)||_F^2 = sum(x^2 * coverage), exactly, for all four padding modes: each entry of a patch is
    either zero or a copy of exactly one input pixel, so its square is counted at that pixel. (A padding that
    interpolates between pixels would make this an inequality; torch has none.) The arguments are those of
    :func:`convolution_axes`, and the input size must be given.
    """
    counts = torch.ones((), dtype=torch.float64)
    for axis in convolution_axes(*geometry, **named):
        counts = counts[..., None] * axis.reads().to(torch.float64)
    return counts.to(dtype)
