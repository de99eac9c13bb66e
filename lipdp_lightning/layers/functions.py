"""torch's functions of a weight, with the gradient of the weight summed over the batch as that of a layer is.

A network may call ``F.linear`` or a convolution of torch with parameters of its own. torch would sum such a gradient in
one product of float32, whose rounding no margin covers (``layers.contribution``), so that the certified graph calls
these functions in their place.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..bounds.registry import sums_in_pieces
from ..norms.conv import convolution_axes
from .scaled import Affine, scaled


@sums_in_pieces(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``F.linear`` of the same arguments."""
    return scaled(input, weight, bias, None, None, Affine())


@sums_in_pieces(F.conv1d, F.conv2d)
def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Returns ``F.conv1d`` or ``F.conv2d`` of the same arguments."""
    axes = convolution_axes(tuple(weight.shape[2:]), stride, dilation, padding)
    sides = [axis.before for axis in axes]
    if any(axis.before != axis.after for axis in axes):
        input = F.pad(input, [side for axis in reversed(axes) for side in (axis.before, axis.after)])
        sides = [0] * len(axes)
    options = ([axis.stride for axis in axes], sides, [axis.dilation for axis in axes], groups)
    return scaled(input, weight, bias, None, None, Affine(options))


@sums_in_pieces(F.conv_transpose1d, F.conv_transpose2d)
def transposed_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Returns ``F.conv_transpose1d`` or ``F.conv_transpose2d`` of the same arguments."""
    rank = weight.dim() - 2
    stride, padding, further, dilation = (
        [v] * rank if isinstance(v, int) else list(v) for v in (stride, padding, output_padding, dilation)
    )
    return scaled(input, weight, bias, None, None, Affine((stride, padding, dilation, groups), further))
