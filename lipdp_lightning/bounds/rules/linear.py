"""Linear and convolution layers: weight and bias form one group (tables 1.2 and 1.3 of the guarantee page)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...norms.conv import Convolution
from ...norms.dense import Dense
from ...norms.geometry import convolution_axes
from ...norms.operators import Operator
from ..registry import rule
from ..values import Bound, Constant, Operation, ParameterUse, Unbounded, Value

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


def _affine(op: Operation, x: Value, weight: Any, bias: Any, operator: Operator, positions: int) -> Bound:
    """Bounds any affine layer with operator norm s, at P output positions, on an input of norm at most X.

    The output is the linear part, at most s X, plus the bias at every position, at most sqrt(P) ||b||. The gradient of
    weight and bias together is sum_p d_p (patch_p, 1)^T for a cotangent d; by Cauchy and Schwarz its Frobenius norm is
    at most ||d|| sqrt(||patches(x)||_F^2 + P), and ||patches(x)||_F is at most kappa X. P is left out if the bias is
    not trained, and kappa X if the weight is not. Kappa is the operator's deviation factor, and 1 for a dense layer.

    Args:
        op: The operation.
        x: The input.
        weight: The weight.
        bias: The bias, or None.
        operator: The operator that the weight defines.
        positions: The number P of output positions.
    """
    matrix, vector = _tensor(weight), None if bias is None else _tensor(bias)
    weights, biases, root = _trained(weight), _trained(bias), math.sqrt(positions)
    lipschitz = op.operator_norm(matrix, operator)
    bias_norm = 0.0 if vector is None else op.norms.vector_norm(vector)
    with_weight = operator.deviation_factor(matrix) * x.norm if weights else 0.0
    trained, gradient = weights + biases, math.hypot(with_weight, root if biases else 0.0)
    uses = (ParameterUse(trained, gradient),) if trained else ()
    return Bound(lipschitz * x.norm + root * bias_norm, lipschitz, uses)


def linear_bound(op: Operation, x: Value, weight: Any, bias: Any) -> Bound:
    """Bounds a dense layer, whose operator is its matrix, applied at every position."""
    matrix = _tensor(weight)
    if matrix.dim() != 2 or (bias is not None and _tensor(bias).shape != matrix.shape[:1]):
        raise Unbounded(
            "torch broadcasts a weight or bias of this shape, which multiplies its gradient",
            "give a weight of shape (outputs, inputs) and a bias of shape (outputs,)",
        )
    return _affine(op, x, weight, bias, Dense(), math.prod(x.shape[:-1]))


@rule(nn.Linear)
def linear_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.Linear)
    return linear_bound(op, x, op.module.weight, op.module.bias)


@rule(F.linear)
def linear(op: Operation, input: Value, weight: Any, bias: Any = None) -> Bound:
    return linear_bound(op, input, weight, bias)


def conv_bound(
    op: Operation,
    x: Value,
    weight: Any,
    bias: Any,
    *,
    stride: Sequence[int],
    padding: Any,
    dilation: Sequence[int],
    groups: int,
    padding_mode: str = "zeros",
) -> Bound:
    """Bounds a convolution, whose operator is that of its kernel on the input's size, padding included."""
    kernel = _tensor(weight)
    rank = kernel.dim() - 2
    if len(x.shape) != rank + 1:
        raise Unbounded(
            f"a convolution over {rank} axes was given one example of shape {x.shape}",
            "give it (batch, channels, ...) with a batch dimension",
        )
    operator = Convolution(tuple(stride), padding, tuple(dilation), groups, padding_mode, tuple(x.shape[1:]))
    return _affine(op, x, weight, bias, operator, math.prod(op.output_shape[1:]))


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


def _pair(value: Any, rank: int) -> Any:
    if isinstance(value, str):
        return value
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _conv_function(op: Operation, x: Value, weight: Any, bias: Any, rank: int, args: Any, kwargs: Any) -> Bound:
    names = ("stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given.update(zip(names, args, strict=False))
    given.update(kwargs)
    groups = given.pop("groups")
    return conv_bound(op, x, weight, bias, groups=groups, **{k: _pair(v, rank) for k, v in given.items()})


@rule(F.conv1d)
def conv1d(op: Operation, input: Value, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Bound:
    return _conv_function(op, input, weight, bias, 1, args, kwargs)


@rule(F.conv2d)
def conv2d(op: Operation, input: Value, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Bound:
    return _conv_function(op, input, weight, bias, 2, args, kwargs)
