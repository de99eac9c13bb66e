"""A convolution as an operator: its polyphase kernel, the torus it acts on, its symbol at given frequencies.

Along each axis a padded, strided convolution is R T E. E embeds the input (and copies border pixels, if the
padding does), T is a stride-free convolution between polyphase components, on a torus or on the whole line,
and R keeps some of its outputs. Hence s(conv) <= ||R|| ||E|| s(T), and s(T) is the largest singular value of
T's symbol: the matrix-valued trigonometric polynomial sum_a W_a exp(-i a theta), where W_a holds the taps
``s a, ..., s a + s - 1`` of the dilated kernel side by side (space-to-depth by the stride s, exact).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp_lightning.bounds.geometry import Axis, Padding, Sizes, convolution_axes
from lipdp_lightning.bounds.gram import as_float64, rounding_margin

FINE_GRID, COARSE_GRID = 16, 9
"""Frequencies per polyphase tap and axis when the torus is larger or its size unknown: 1.005 or 1.016 high."""


@dataclass(frozen=True)
class Convolution:
    """Kernel in float64, largest entry 1, as (groups, c_out / groups, c_in / groups, *taps); its geometry."""

    kernel: Tensor
    scale: float
    axes: tuple[Axis, ...]

    @property
    def rows(self) -> int:
        return self.kernel.shape[1]

    @property
    def columns(self) -> int:
        return self.kernel[0, 0].numel()

    def matrices(self) -> Tensor:
        return self.kernel.flatten(2)

    def certified(self, norm: float, margin: float = 1.0) -> float:
        """Undo the scaling; add the rounding margin, also absolutely: symbols may cancel on a small torus."""
        rounding = margin * rounding_margin(self.rows, self.columns)
        frobenius = float(self.matrices().square().sum(dim=(1, 2)).max().sqrt())
        return math.nextafter((norm * rounding + (rounding - 1.0) * frobenius) * self.scale, math.inf)


def build_convolution(
    kernel: Tensor,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
    padding_mode: str,
    input_size: Sizes | None,
    name: str,
) -> Convolution:
    if kernel.ndim not in (3, 4):
        raise ValueError(
            f"{name} has shape {tuple(kernel.shape)}: a convolution kernel needs one or two spatial axes.\n"
            "HINT: use dense_norm for matrices; three-dimensional convolutions have no certified norm here."
        )
    if groups < 1 or kernel.shape[0] % groups:
        raise ValueError(f"{name}: groups={groups} does not divide {kernel.shape[0]} outputs.\nHINT: check groups.")
    axes = convolution_axes(tuple(kernel.shape[2:]), stride, dilation, padding, padding_mode, input_size)
    values = as_float64(kernel, name)
    scale = float(values.abs().max())
    values = values / scale if scale > 0 else values
    return Convolution(values.reshape(groups, -1, *kernel.shape[1:]), scale, axes)


def polyphase(convolution: Convolution) -> Tensor:
    """Space-to-depth: (groups, outputs, inputs * prod(stride), taps per axis ceil(span / stride))."""
    kernel = convolution.kernel
    for index, axis in enumerate(convolution.axes):
        taps = -(-axis.span // axis.stride)
        kernel = kernel.movedim(3 + index, -1)
        dilated = kernel.new_zeros(*kernel.shape[:-1], taps * axis.stride)
        dilated[..., : axis.span : axis.dilation] = kernel
        phases = dilated.reshape(*dilated.shape[:-1], taps, axis.stride).movedim(-1, 3)
        kernel = phases.flatten(2, 3).movedim(-1, 3 + index)
    return kernel


def reduction(axis: Axis) -> tuple[int | None, float]:
    """Torus on which T acts (None: the whole line bounds every torus) and ||R||^2 ||E||^2.

    Zero padding: the padded input, cut into polyphase components, on any torus of at least ceil(padded /
    stride) points: no output kept by R reads across the seam. A torus of the bare input is too short.
    Circular padding whose stride divides the input: the torus of input / stride points, its outputs repeated
    when the padding yields more than one period. Otherwise: the padding is a matrix of norm sqrt(copies),
    followed by a convolution without padding.
    """
    whole_period = axis.size is not None and axis.size % axis.stride == 0
    if axis.mode == "circular" and whole_period:
        period = axis.known_size // axis.stride
        return period, float(-(-axis.outputs // period))
    if axis.size is None and (axis.mode == "zeros" or axis.before == axis.after == 0):
        return None, 1.0
    if axis.size is None and axis.mode == "circular" and axis.stride == 1 and axis.before + axis.after < axis.span:
        return None, 1.0  # at most one period of outputs, whatever the size
    return -(-axis.padded // axis.stride), float(axis.max_copies())


def frequencies(axis: Axis, taps: int, per_tap: int = FINE_GRID) -> tuple[int, float]:
    """Number of sampled frequencies, and the factor from their maximum to the supremum that is needed.

    |u^* S(theta) v| is a real trigonometric polynomial of degree (taps - 1) / 2 after a shift of phase. By
    Riesz such a polynomial falls from its maximum no faster than a cosine of its degree, so N equidistant
    samples reach at least cos(pi (taps - 1) / (2 N)) of it. A torus of N points needs exactly its own N
    frequencies.
    """
    torus, _ = reduction(axis)
    sampled = 1 if taps == 1 else per_tap * (taps - 1)
    if torus is not None and torus <= sampled:
        return torus, 1.0
    return sampled, 1.0 / math.cos(math.pi * (taps - 1) / (2 * sampled))


def symbol(blocks: Tensor, grid: Sequence[int], first: slice = slice(None)) -> Tensor:
    """(groups, frequencies, outputs, inputs): the symbol on a grid, half of the last axis by conjugate
    symmetry.
    """
    symbol = blocks.to(torch.complex128)
    for index, count in enumerate(grid):
        chosen = torch.arange(count // 2 + 1 if index == len(grid) - 1 else count, device=blocks.device)
        chosen = chosen[first] if index == 0 else chosen
        taps = torch.arange(symbol.shape[3], device=blocks.device)
        angle = (taps[:, None] * chosen[None, :] % count).to(torch.float64) * (-2.0 * math.pi / count)
        symbol = torch.tensordot(symbol, torch.polar(torch.ones_like(angle), angle), dims=([3], [0]))
    return symbol.flatten(3).permute(0, 3, 1, 2)
