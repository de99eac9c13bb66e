"""Transposed convolutions: the adjoints of convolutions, with their norms and their weights' gradients."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...norms.operators import Convolution
from ..registry import rule
from ..values import Bound, Operation, Unbounded, Value
from .linear import _affine, _pair, _tensor


def transposed_operator(size: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
    """Returns the convolution of which a transposed one with outputs of this size is the adjoint.

    A matrix and its transpose have one norm. In <d, A^T x> = <A d, x>, cotangent d and input x change places: the
    gradient of the weight is that of the convolution A whose input is d and whose cotangent is x. It is at most
    ||x|| ||patches(d)||_F, and the patches of d are at most kappa ||d||, so the convolution's factor serves here, too.
    """
    return Convolution(tuple(stride), tuple(padding), tuple(dilation), groups, "zeros", size)


def _transposed(
    op: Operation, x: Value, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any,
    groups: int,
) -> Bound:  # fmt: skip
    rank = _tensor(weight).dim() - 2
    if len(x.shape) != rank + 1:
        raise Unbounded(
            f"a transposed convolution over {rank} axes was given one example of shape {x.shape}",
            "give it (batch, channels, ...) with a batch dimension",
        )
    if any(more >= step for more, step in zip(output_padding, stride, strict=True)):
        raise Unbounded(
            f"its output_padding {output_padding} is not below its stride {stride}, and the convolution of which it is "
            "the adjoint has more outputs than it has inputs",
            "use an output_padding below the stride, and pad the output",
        )
    size = op.output_shape[1:]
    operator = transposed_operator(size, stride, padding, dilation, groups)
    return _affine(op, x, weight, bias, operator, math.prod(size))


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d)
def transposed_module(op: Operation, x: Value) -> Bound:
    m: Any = op.module
    return _transposed(op, x, m.weight, m.bias, m.stride, m.padding, m.output_padding, m.dilation, m.groups)


@rule(F.conv_transpose1d, F.conv_transpose2d)
def transposed(
    op: Operation, input: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Bound:  # fmt: skip
    rank = _tensor(weight).dim() - 2
    stride, padding, output_padding, dilation = (_pair(v, rank) for v in (stride, padding, output_padding, dilation))
    return _transposed(op, input, weight, bias, stride, padding, output_padding, dilation, groups)
