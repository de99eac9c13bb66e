"""Transposed convolutions: the adjoints of convolutions, with their norms and their weights' gradients."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...norms.conv import Convolution
from ..registry import Bound, Operation, Unbounded, Value, rule
from .linear import _affine, _tensor


def transposed_operator(size: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
    """Returns the convolution of which a transposed one with outputs of this size is the adjoint.

    A matrix and its transpose have one norm. In <d, A^T x> = <A d, x>, cotangent d and input x change places: the
    gradient of the weight is that of the convolution A whose input is d and whose cotangent is x. It is at most
    ||x|| ||patches(d)||_F, and the patches of d are at most kappa ||d||, so the convolution's factor serves here, too.
    """
    return Convolution(tuple(stride), tuple(padding), tuple(dilation), groups, "zeros", size)


@rule(F.conv_transpose1d, F.conv_transpose2d)
def transposed_bound(
    op: Operation, input: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Bound:  # fmt: skip
    """Bounds a transposed convolution by the convolution of which it is the adjoint."""
    kernel = _tensor(weight)
    rank, size = kernel.dim() - 2, op.output_shape[1:]
    if len(input.shape) != rank + 1:
        raise Unbounded(
            f"a transposed convolution over {rank} axes was given one example of shape {input.shape}",
            "give it (batch, channels, ...) with a batch dimension",
        )
    stride, padding, dilation, more = (
        (v,) * rank if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation, output_padding)
    )
    if any(further >= step for further, step in zip(more, stride, strict=True)):
        raise Unbounded(
            f"its output_padding {more} is not below its stride {stride}, and the convolution of which it is the "
            "adjoint has more outputs than it has inputs",
            "use an output_padding below the stride, and pad the output",
        )
    operator = transposed_operator(size, stride, padding, dilation, groups)
    return _affine(op, input, weight, bias, operator, math.prod(size), operator.deviation_factor(kernel))


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d)
def transposed_module(op: Operation, x: Value) -> Bound:
    m: Any = op.module
    return transposed_bound(
        op, x, m.weight, m.bias, m.stride, m.padding, m.output_padding, m.groups, m.dilation
    )  # fmt: skip
