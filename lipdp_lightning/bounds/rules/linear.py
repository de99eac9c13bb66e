"""Linear and convolution layers: weight and bias form one group (tables 1.2 and 1.3 of the guarantee page)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...norms.conv import Convolution, convolution_axes
from ...norms.dense import Dense
from ...norms.operators import Operator
from ..registry import Bound, Constant, Operation, ParameterUse, Unbounded, Value, rule

Weight = Tensor | nn.Parameter


def _tensor(value: Any) -> Tensor:
    """Returns the weight, whether it is trained or a constant."""
    if isinstance(value, Constant):
        return value.tensor
    if not isinstance(value, Tensor):
        raise Unbounded(
            "a weight that depends on the example is a product of activations, which is not Lipschitz",
            "use a parameter or a buffer as the weight",
        )
    return value


def _trained(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, nn.Parameter) and value.requires_grad else ()


def _affine(op: Operation, x: Value, weight: Any, bias: Any, operator: Operator, positions: int, kappa: float) -> Bound:
    """Bounds any affine layer with operator norm s, at P output positions, on an input of norm at most X.

    The output is the linear part, at most s X, plus the bias at every position, at most sqrt(P) ||b||. The gradient of
    weight and bias together is sum_p d_p (patch_p, 1)^T for a cotangent d; by Cauchy and Schwarz its Frobenius norm is
    at most ||d|| sqrt(||patches(x)||_F^2 + P), and ||patches(x)||_F is at most kappa X. P is left out if the bias is
    not trained, and kappa X if the weight is not.

    Args:
        op: The operation.
        x: The input.
        weight: The weight.
        bias: The bias, or None.
        operator: The operator that the weight defines.
        positions: The number P of output positions.
        kappa: The operator's deviation factor, which is 1 for a dense layer.
    """
    matrix, vector = _tensor(weight), None if bias is None else _tensor(bias)
    weights, biases, root = _trained(weight), _trained(bias), math.sqrt(positions)
    lipschitz = op.operator_norm(matrix, operator)
    bias_norm = 0.0 if vector is None else op.norms.vector_norm(vector)
    trained, gradient = weights + biases, math.hypot(kappa * x.norm if weights else 0.0, root if biases else 0.0)
    uses = (ParameterUse(trained, gradient),) if trained else ()
    return Bound(lipschitz * x.norm + root * bias_norm, lipschitz, uses)


@rule(F.linear)
def linear_bound(op: Operation, input: Value, weight: Any, bias: Any = None) -> Bound:
    """Bounds a dense layer, whose operator is its matrix, applied at every position."""
    matrix = _tensor(weight)
    if matrix.dim() != 2 or (bias is not None and _tensor(bias).shape != matrix.shape[:1]):
        raise Unbounded(
            "torch broadcasts a weight or bias of this shape, which multiplies its gradient",
            "give a weight of shape (outputs, inputs) and a bias of shape (outputs,)",
        )
    return _affine(op, input, weight, bias, Dense(), math.prod(input.shape[:-1]), 1.0)


@rule(nn.Linear)
def linear_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.Linear)
    return linear_bound(op, x, op.module.weight, op.module.bias)


@rule(F.conv1d, F.conv2d)
def conv_bound(
    op: Operation, input: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, *, padding_mode: str = "zeros",
) -> Bound:  # fmt: skip
    """Bounds a convolution, whose operator is that of its kernel on the input's size, padding included."""
    kernel = _tensor(weight)
    rank = kernel.dim() - 2
    if len(input.shape) != rank + 1:
        raise Unbounded(
            f"a convolution over {rank} axes was given one example of shape {input.shape}",
            "give it (batch, channels, ...) with a batch dimension",
        )
    stride, padding, dilation = (v if isinstance(v, int | str) else tuple(v) for v in (stride, padding, dilation))
    operator = Convolution(stride, padding, dilation, groups, padding_mode, tuple(input.shape[1:]))
    kappa = operator.deviation_factor(kernel)
    return _affine(op, input, weight, bias, operator, math.prod(op.output_shape[1:]), kappa)


@lru_cache(maxsize=1024)
def _sides(kernel: tuple[int, ...], stride: Any, dilation: Any, padding: Any) -> tuple[int, ...]:
    """Returns the widths that torch's convolutions pass to F.pad, the last axis first."""
    axes = convolution_axes(kernel, stride, dilation, padding)
    return tuple(side for axis in reversed(axes) for side in (axis.before, axis.after))


@rule(nn.Conv1d, nn.Conv2d)
def conv_module(op: Operation, x: Value) -> Bound:
    m: Any = op.module
    if _sides(tuple(m.weight.shape[2:]), m.stride, m.dilation, m.padding) != tuple(m._reversed_padding_repeated_twice):
        raise Unbounded(
            f"its padding was changed to {m.padding} after it was made, and its forward pads by other widths",
            "make a new convolution with this padding",
        )
    return conv_bound(
        op, x, m.weight, m.bias,
        stride=m.stride, padding=m.padding, dilation=m.dilation, groups=m.groups, padding_mode=m.padding_mode,
    )  # fmt: skip
