"""Elementwise activations, GroupSort and softmax.

Constants that are not closed forms are the suprema of the derivative's absolute value, rounded up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..registry import Target, rule
from ..values import Bound, Operation, Unbounded, Value, full_precision, public_number

SELU = 1.758100
GELU_ERF = 1.128905
GELU_TANH = 1.128994
SILU = 1.099840
MISH = 1.088499
HARDSWISH = 1.5
HARDSIGMOID = 0.1666667  # torch multiplies by the float32 number above 1/6, in float64 too


def _zero_at_zero(lipschitz: float, largest: float = math.inf) -> Callable[..., Bound]:
    """An elementwise map with f(0) = 0: its output norm is at most lipschitz * X, or sqrt(dim) * sup|f|."""

    def bound(op: Operation, x: Value, *args: Any, **kwargs: Any) -> Bound:
        return Bound(min(lipschitz * x.norm, math.sqrt(x.numel) * largest), lipschitz)

    return bound


# GELU, SiLU, Mish and hardswish satisfy |f(x)| <= |x|, though their slope exceeds 1.
def _shrinking(lipschitz: float) -> Callable[..., Bound]:
    def bound(op: Operation, x: Value, *args: Any, **kwargs: Any) -> Bound:
        return Bound(x.norm, lipschitz)

    return bound


_SIMPLE: list[tuple[Callable[..., Bound], tuple[Target, ...]]] = [
    (_zero_at_zero(1.0), (nn.ReLU, torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_")),
    (_zero_at_zero(1.0, 6.0), (nn.ReLU6, F.relu6)),
    (_zero_at_zero(1.0, 1.0), (nn.Tanh, torch.tanh, torch.tanh_, F.tanh, "tanh", "tanh_")),
    (_zero_at_zero(1.0, 1.0), (nn.Softsign, F.softsign)),
    (_zero_at_zero(1.0), (torch.abs, torch.absolute, operator.abs, abs, "abs", "abs_", "absolute")),
    (_zero_at_zero(SELU), (nn.SELU, torch.selu, torch.selu_, F.selu, F.selu_)),
    (_zero_at_zero(1.0), (nn.Softshrink, nn.Tanhshrink, F.softshrink, F.tanhshrink)),
    (_shrinking(SILU), (nn.SiLU, F.silu)),
    (_shrinking(MISH), (nn.Mish, F.mish)),
    (_shrinking(HARDSWISH), (nn.Hardswish, F.hardswish)),
]
for _bound, _targets in _SIMPLE:
    rule(*_targets)(_bound)


def _has_gradient(slope: float, inplace: bool) -> None:
    if inplace and public_number(slope) < 0:
        raise Unbounded(f"in place with a negative slope, {slope}, it has no gradient", "drop inplace")


def _leaky(x: Value, slope: float, inplace: bool) -> Bound:
    _has_gradient(slope, inplace)
    constant = max(1.0, abs(public_number(slope)))
    return Bound(constant * x.norm, constant)


@rule(nn.LeakyReLU)
def leaky_relu_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.LeakyReLU)
    return _leaky(x, op.module.negative_slope, op.module.inplace)


@rule(F.leaky_relu, F.leaky_relu_)
def leaky_relu(op: Operation, x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Bound:
    return _leaky(x, negative_slope, inplace or op.name.endswith("_"))


def _elu(x: Value, alpha: float, inplace: bool) -> Bound:
    _has_gradient(alpha, inplace)
    constant = max(1.0, abs(public_number(alpha)))
    return Bound(constant * x.norm, constant)


@rule(nn.ELU)
def elu_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.ELU)
    return _elu(x, op.module.alpha, op.module.inplace)


@rule(F.elu)
def elu(op: Operation, x: Value, alpha: float = 1.0, inplace: bool = False) -> Bound:
    return _elu(x, alpha, inplace)


@rule(F.elu_)
def elu_in_place(op: Operation, x: Value, alpha: float = 1.0) -> Bound:
    """torch takes a scale and an input scale here; they have no rule."""
    return _elu(x, alpha, True)


@rule(nn.CELU)
def celu_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.CELU)
    return celu(op, x, op.module.alpha)


@rule(torch.celu, torch.celu_, F.celu, F.celu_)
def celu(op: Operation, x: Value, alpha: float = 1.0, inplace: bool = False) -> Bound:
    if not public_number(alpha) > 0:
        raise Unbounded(f"CELU with alpha={alpha}", "use a positive alpha")
    return Bound(x.norm, 1.0)


def _gelu(x: Value, approximate: str) -> Bound:
    return Bound(x.norm, GELU_TANH if approximate == "tanh" else GELU_ERF)


@rule(nn.GELU)
def gelu_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.GELU)
    return _gelu(x, op.module.approximate)


@rule(F.gelu)
def gelu(op: Operation, x: Value, approximate: str = "none") -> Bound:
    return _gelu(x, approximate)


@rule(nn.Hardtanh)
def hardtanh_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.Hardtanh)
    return hardtanh(op, x, op.module.min_val, op.module.max_val)


@rule(F.hardtanh, F.hardtanh_)
def hardtanh(op: Operation, x: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Bound:
    return clamp(op, x, min_val, max_val)


@rule(torch.clamp, torch.clip, torch.clamp_, torch.clip_, "clamp", "clamp_", "clip", "clip_")
def clamp(op: Operation, x: Value, min: float | None = None, max: float | None = None) -> Bound:
    """The projection onto [min, max]: 1-Lipschitz; at zero it gives the point of the interval nearest to zero."""
    if any(limit is not None and not (isinstance(limit, int | float) and limit == limit) for limit in (min, max)):
        raise Unbounded("its limits are not public numbers", "clamp to numbers")
    low = -math.inf if min is None else float(min)
    high = math.inf if max is None else float(max)
    at_zero = builtin_max(low, -high, 0.0)
    largest = builtin_max(abs(low), abs(high))
    root = math.sqrt(x.numel)
    return Bound(builtin_min(x.norm + root * at_zero, root * largest), 1.0)


builtin_max, builtin_min = max, min


@rule(torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_")
def clamp_min(op: Operation, x: Value, min: float) -> Bound:
    return clamp(op, x, min, None)


@rule(torch.clamp_max, torch.clamp_max_, "clamp_max", "clamp_max_")
def clamp_max(op: Operation, x: Value, max: float) -> Bound:
    return clamp(op, x, None, max)


@rule(nn.Sigmoid, torch.sigmoid, torch.sigmoid_, F.sigmoid, "sigmoid", "sigmoid_")
def sigmoid(op: Operation, x: Value) -> Bound:
    return Bound(math.sqrt(x.numel), 0.25)


@rule(nn.Hardsigmoid, F.hardsigmoid)
def hardsigmoid(op: Operation, x: Value, inplace: bool = False) -> Bound:
    return Bound(math.sqrt(x.numel), HARDSIGMOID)


def _softplus(x: Value, beta: float) -> Bound:
    # softplus(0) = ln 2 / beta; the slope lies in (0, 1) for every beta > 0
    if not public_number(beta) > 0:
        raise Unbounded(f"softplus with beta={beta}", "use a positive beta")
    return Bound(x.norm + math.sqrt(x.numel) * math.log(2.0) / beta, 1.0)


@rule(nn.Softplus)
def softplus_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.Softplus)
    return _softplus(x, op.module.beta)


@rule(F.softplus)
def softplus(op: Operation, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Bound:
    return _softplus(x, beta)


@rule(nn.LogSigmoid, F.logsigmoid)
def logsigmoid(op: Operation, x: Value) -> Bound:
    return _softplus(x, 1.0)


@rule(nn.Softmax)
def softmax_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.Softmax)
    if op.module.dim is None:
        raise Unbounded("Softmax without a dim guesses one", "give Softmax(dim=1) or later")
    return softmax(op, x, op.module.dim)


@rule(torch.softmax, F.softmax, "softmax")
def softmax(op: Operation, x: Value, dim: int | None = None, **kwargs: Any) -> Bound:
    """Jacobian diag(p) - p p^T has norm at most 1/2; each distribution has norm at most 1."""
    full_precision(*kwargs.values())
    inner = op.inner_dims(dim, len(x.shape))
    return Bound(math.sqrt(x.numel / x.shape[inner[0]]), 0.5)


@rule(nn.Identity)
def identity(op: Operation, x: Value) -> Bound:
    return Bound(x.norm, 1.0)


@rule(nn.Dropout)
def dropout(op: Operation, x: Value) -> Bound:
    """Survivors are multiplied by 1 / (1 - p) in training; in evaluation it is the identity."""
    assert isinstance(op.module, nn.Dropout)
    p = op.module.p
    scale = 1 / (1 - p) if p < 1 else 1.0
    return Bound(scale * x.norm, scale)
