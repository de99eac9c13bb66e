"""Rules of pointwise functions, softmax and dropout.

Constants without a closed form are suprema of the derivative's absolute value, rounded up.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..registry import (
    Bound,
    Constant,
    Operation,
    ParameterUse,
    Target,
    Unbounded,
    Value,
    full_precision,
    module_rule_of,
    public_number,
    rule,
)
from .structure import real

SELU = 1.758100
GELU_ERF = 1.128905
GELU_TANH = 1.128994
SILU = 1.099840
MISH = 1.088499
HARDSWISH = 1.5
ERF = 1.128380  # 2 / sqrt(pi), the slope at zero, rounded up
HARDSIGMOID = 0.1666667  # torch multiplies by the float32 number above 1/6, in float64, too


def _pointwise(slope: float, growth: float, largest: float) -> Callable[..., Bound]:
    """Returns the rule of a pointwise map, whose options, if it has any, do not change its constants.

    Args:
        slope: sup |f'|.
        growth: sup |f(x)| / |x|; infinite unless f(0) = 0.
        largest: sup |f|.
    """

    def bound(op: Operation, x: Value, lambd: float = 0.5, *, inplace: bool = False) -> Bound:
        by_norm = math.inf if growth == math.inf else growth * x.norm
        by_size = math.inf if largest == math.inf else largest * math.sqrt(x.numel)
        return Bound(builtins.min(by_norm, by_size), slope)

    return bound


# GELU, SiLU, Mish and hardswish satisfy |f(x)| <= |x|, though their slope exceeds 1.
_POINTWISE: list[tuple[float, float, float, tuple[Target, ...]]] = [
    (1.0, 1.0, math.inf, (nn.ReLU, torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_", nn.Identity)),
    (1.0, 1.0, 6.0, (nn.ReLU6, F.relu6)),
    (1.0, 1.0, 1.0, (nn.Tanh, torch.tanh, torch.tanh_, F.tanh, "tanh", "tanh_", nn.Softsign, F.softsign)),
    (1.0, 1.0, math.inf, (torch.abs, torch.absolute, operator.abs, abs, "abs", "abs_", "absolute")),
    (1.0, 1.0, math.inf, (nn.Softshrink, nn.Tanhshrink, F.softshrink, F.tanhshrink)),
    (SELU, SELU, math.inf, (nn.SELU, torch.selu, torch.selu_, F.selu, F.selu_)),
    (SILU, 1.0, math.inf, (nn.SiLU, F.silu)),
    (MISH, 1.0, math.inf, (nn.Mish, F.mish)),
    (HARDSWISH, 1.0, math.inf, (nn.Hardswish, F.hardswish)),
    (0.25, math.inf, 1.0, (nn.Sigmoid, torch.sigmoid, torch.sigmoid_, F.sigmoid, "sigmoid", "sigmoid_")),
    (HARDSIGMOID, math.inf, 1.0, (nn.Hardsigmoid, F.hardsigmoid)),
    (ERF, ERF, 1.0, (torch.erf, torch.erf_, "erf", "erf_")),
    (1.0, 1.0, 1.0, (torch.sin, torch.sin_, "sin", "sin_")),
    (1.0, math.inf, 1.0, (torch.cos, torch.cos_, "cos", "cos_")),
]
for *_constants, _targets in _POINTWISE:
    rule(*_targets)(_pointwise(*_constants))


def _steepest(x: Value, slope: float, inplace: bool) -> Bound:
    """Bounds a map with slope 1 on one side of zero and at most ``slope`` on the other, which keeps zero."""
    if inplace and public_number(slope) < 0:
        raise Unbounded(f"in place with a negative slope, {slope}, it has no gradient", "drop inplace")
    constant = max(1.0, abs(public_number(slope)))
    return Bound(constant * x.norm, constant)


@rule(F.leaky_relu, F.leaky_relu_)
@module_rule_of(nn.LeakyReLU, options=("negative_slope", "inplace"))
def leaky_relu(op: Operation, x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Bound:
    return _steepest(x, negative_slope, inplace or op.name.endswith("_"))


@rule(F.elu)
@module_rule_of(nn.ELU, options=("alpha", "inplace"))
def elu(op: Operation, x: Value, alpha: float = 1.0, inplace: bool = False) -> Bound:
    return _steepest(x, alpha, inplace)


@rule(F.elu_)
def elu_in_place(op: Operation, x: Value, alpha: float = 1.0) -> Bound:
    """Bounds F.elu_, whose further arguments (a scale and an input scale) have no rule."""
    return _steepest(x, alpha, True)


@rule(torch.celu, torch.celu_, F.celu, F.celu_)
@module_rule_of(nn.CELU, options=("alpha",))
def celu(op: Operation, x: Value, alpha: float = 1.0, inplace: bool = False) -> Bound:
    """Bounds CELU, whose slope exp(x / alpha) below zero is at most 1 for every alpha > 0."""
    if not public_number(alpha) > 0:
        raise Unbounded(f"CELU with alpha={alpha} is not Lipschitz", "use a positive alpha")
    return Bound(x.norm, 1.0)


@rule(torch.prelu, F.prelu, "prelu")
@module_rule_of(nn.PReLU, options=("weight",))
def prelu(op: Operation, x: Value, weight: Constant | nn.Parameter) -> Bound:
    """Bounds PReLU by its steepest slope.

    The gradient of a channel's slope is the inner product of the cotangent with the channel's negative entries; by
    Cauchy and Schwarz, the slopes' gradients together have a norm of at most ||d|| ||x||.
    """
    if not isinstance(weight, Constant | nn.Parameter):
        raise Unbounded("a slope that depends on the example is a product of activations", "give a constant slope")
    slopes = weight if isinstance(weight, nn.Parameter) else weight.tensor
    constant = max(1.0, public_number(float(real(slopes).abs().max())))
    trained = isinstance(weight, nn.Parameter) and weight.requires_grad
    return Bound(constant * x.norm, constant, (ParameterUse((slopes,), x.norm),) if trained else ())


@rule(F.gelu)
@module_rule_of(nn.GELU, options=("approximate",))
def gelu(op: Operation, x: Value, approximate: str = "none") -> Bound:
    return Bound(x.norm, GELU_TANH if approximate == "tanh" else GELU_ERF)


@rule(torch.clamp, torch.clip, torch.clamp_, torch.clip_, "clamp", "clamp_", "clip", "clip_")
def clamp(op: Operation, x: Value, min: float | None = None, max: float | None = None) -> Bound:
    """Bounds the projection onto [min, max], which is 1-Lipschitz and maps zero to the nearest point."""
    if any(limit is not None and not (isinstance(limit, int | float) and limit == limit) for limit in (min, max)):
        raise Unbounded("its limits are not public numbers", "clamp to numbers")
    low = -math.inf if min is None else float(min)
    high = math.inf if max is None else float(max)
    at_zero = builtins.max(low, -high, 0.0)
    largest = builtins.max(abs(low), abs(high))
    root = math.sqrt(x.numel)
    return Bound(builtins.min(x.norm + root * at_zero, root * largest), 1.0)


@rule(F.hardtanh, F.hardtanh_)
@module_rule_of(nn.Hardtanh, options=("min_val", "max_val"))
def hardtanh(op: Operation, x: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Bound:
    return clamp(op, x, min_val, max_val)


@rule(torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_")
def clamp_min(op: Operation, x: Value, min: float) -> Bound:
    return clamp(op, x, min, None)


@rule(torch.clamp_max, torch.clamp_max_, "clamp_max", "clamp_max_")
def clamp_max(op: Operation, x: Value, max: float) -> Bound:
    return clamp(op, x, None, max)


@rule(F.softplus, F.logsigmoid, nn.LogSigmoid)
@module_rule_of(nn.Softplus, options=("beta",))
def softplus(op: Operation, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Bound:
    """Bounds softplus, which is ln 2 / beta at zero and has a slope in (0, 1) for beta > 0, and its mirror image."""
    if not public_number(beta) > 0:
        raise Unbounded(f"softplus with beta={beta} has no bound", "use a positive beta")
    return Bound(x.norm + math.sqrt(x.numel) * math.log(2.0) / beta, 1.0)


@rule(torch.softmax, F.softmax, "softmax")
@module_rule_of(nn.Softmax, options=("dim",))
def softmax(op: Operation, x: Value, dim: int | None = None, **kwargs: Any) -> Bound:
    """Bounds softmax: the Jacobian diag(p) - p p^T has norm at most 1/2, and each distribution norm at most 1."""
    full_precision(*kwargs.values())
    if dim is None:
        raise Unbounded("softmax without a dim guesses one", "give dim=1 or later")
    inner = op.inner_dims(dim, len(x.shape))
    return Bound(math.sqrt(x.numel / x.shape[inner[0]]), 0.5)


@rule(nn.Dropout)
def dropout(op: Operation, x: Value) -> Bound:
    """Bounds dropout, which multiplies kept entries by 1 / (1 - p) in training and is the identity in evaluation."""
    assert isinstance(op.module, nn.Dropout)
    p = op.module.p
    scale = 1 / (1 - p) if p < 1 else 1.0
    return Bound(scale * x.norm, scale)
