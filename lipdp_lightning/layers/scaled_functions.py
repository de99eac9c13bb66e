"""Linear layer and convolution whose parameter gradient weighs each example by a factor, unlike the input gradient.

The gradient of the weight is sum_i c_i g_i. It is computed as one product in which the rows of the cotangent or of
the input, whichever is smaller, are multiplied by c: no per-sample gradient exists at any time. With ``keep``, the
backward pass hands (input, cotangent) over in place of that sum, which is formed once all c_i are known.

Sums over many rows are formed in pieces, which are added in float64. Products of float32 are added in float32, so that
every addition rounds by a share of the partial sum beneath it; over thousands of equal rows with hundreds of positions,
these roundings move a sum by several percent of one example's bound. ``mechanism.allocation.sum_margin`` says what is
left of that with pieces of ``TERMS_OF_A_PIECE`` terms, and pays for it. Where a GPU may use its tensor cores, a kernel
adds 64 terms in float32, and these sums in float64 (``kernels/gpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.arithmetic import products_on_tensor_cores
from ..kernels.loops import gpu_kernels

TERMS_OF_A_PIECE = 1 << 14  # rows times positions that one product in float32 adds up, unless one row has more

Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]
Keep = Callable[[Tensor, Tensor], None]


def _in_full_precision(backward: Backward) -> Backward:
    """Lets a backward pass form the sum over the batch in the weight's own precision, also inside autocast."""

    @wraps(backward)
    def without_autocast(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(cotangent.device.type, enabled=False):
            return backward(ctx, cotangent)

    return without_autocast


def _rows(factor: Tensor, like: Tensor) -> Tensor:
    return factor.to(like.dtype).reshape(-1, *(1,) * (like.dim() - 1))


def _weigh(cotangent: Tensor, inputs: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns cotangent and input; the smaller one of them is multiplied by the factor."""
    if factor is None:
        return cotangent, inputs
    if cotangent.numel() <= inputs.numel():
        return cotangent * _rows(factor, cotangent), inputs
    return cotangent, inputs * _rows(factor, inputs)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
    """Returns a convolution over one or two axes; the options are stride, padding, dilation and groups."""
    return (F.conv1d if weight.dim() == 3 else F.conv2d)(inputs, weight, bias, *options)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor: Tensor | None,
        keep: Keep | None,
        options: tuple[Any, ...] | None,
        tensor_cores: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, factor)
        ctx.keep, ctx.options, ctx.tensor_cores = keep, options, tensor_cores
        return F.linear(inputs, weight, bias) if options is None else convolve(inputs, weight, bias, options)

    @staticmethod
    @once_differentiable
    @_in_full_precision
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, factor = ctx.saved_tensors
        to_input, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if to_input:
            cast = weight.to(cotangent.dtype)
            linear = ctx.options is None
            grad_input = cotangent @ cast if linear else _conv_gradient(cotangent, inputs, cast, ctx.options, which=0)
            grad_input = grad_input.to(inputs.dtype)
        if ctx.keep is not None:
            ctx.keep(inputs, cotangent)
        elif to_weight or to_bias:
            trains = to_weight, to_bias
            grad_weight, grad_bias = weighted_gradients(
                inputs, cotangent, weight, factor, trains, ctx.options, ctx.tensor_cores
            )
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _weighted_bias(full: Tensor, left: Tensor, factor: Tensor | None, channel: int, kind: torch.dtype) -> Tensor:
    """Returns sum_i c_i sum_p d_ip of that dtype; if the cotangent was weighed, its rows are reused."""
    others = [d for d in range(full.dim()) if d != channel % full.dim()]
    if left is not full or factor is None:
        return left.sum(others, dtype=kind)
    per_example = full.sum(others[1:]) if len(others) > 1 else full
    return factor.to(full.dtype) @ per_example


def weighted_gradients(
    inputs: Tensor, cotangent: Tensor, weight: Tensor, factor: Tensor | None, trains: tuple[bool, bool],
    options: tuple[Any, ...] | None, tensor_cores: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Returns sum_i c_i g_i for the weight and the bias, or None for one that is not trained.

    Args:
        inputs: The layer's inputs.
        cotangent: The cotangent at its output.
        weight: Its weight.
        factor: The factors c_i; None stands for 1.
        trains: Whether the weight and the bias are trained.
        options: Stride, padding, dilation and groups of a convolution; None for a linear layer.
        tensor_cores: Whether a GPU may round the factors of the product to the 11 bits of TF32, for which the margin of
            the sum has to pay (``mechanism.allocation.sum_margin``).
    """
    kernels = gpu_kernels(inputs.device) if tensor_cores and (options is None or options[3] == 1) else None
    full, x = cotangent, inputs
    if kernels is None or factor is not None:  # the kernel reads factors of a product as they are
        full, x = cotangent.to(weight.dtype), inputs.to(weight.dtype)
    left, right = _weigh(full, x, factor)
    grad_weight = grad_bias = None
    if trains[0] and kernels is not None:
        grad_weight = kernels.weight_gradient(left, right, weight.shape, options).to(weight.dtype)
    elif trains[0]:
        with products_on_tensor_cores(tensor_cores):
            grad_weight = _sum_of_pieces(left, right, weight, options)
    if trains[1]:
        grad_bias = _weighted_bias(full, left, factor, -1 if options is None else 1, weight.dtype)
    return grad_weight, grad_bias


def _sum_of_pieces(left: Tensor, right: Tensor, weight: Tensor, options: tuple[Any, ...] | None) -> Tensor:
    """Returns the sum over rows and positions of left times right, of a few rows at a time."""
    rows, features = left.shape[0], left.shape[-1 if options is None else 1]
    some = max(1, TERMS_OF_A_PIECE * features // max(1, left[:1].numel()))
    if rows <= some:
        return _product(left, right, weight, options)
    total = torch.zeros_like(weight, dtype=torch.float64)
    for part, other in zip(left.split(some), right.split(some), strict=True):
        total += _product(part, other, weight, options)
    return total.to(weight.dtype)


def _product(left: Tensor, right: Tensor, weight: Tensor, options: tuple[Any, ...] | None) -> Tensor:
    if options is None:
        return left.reshape(-1, left.shape[-1]).t() @ right.reshape(-1, right.shape[-1])
    return _conv_gradient(left, right, weight, options, which=1)


def _conv_gradient(cotangent: Tensor, inputs: Tensor, weight: Tensor, options: tuple[Any, ...], which: int) -> Tensor:
    stride, padding, dilation, groups = options
    if inputs.shape[0] == 0:
        return torch.zeros_like(weight if which else inputs)
    mask = [which == 0, which == 1, False]
    no_output_padding = [0] * (weight.dim() - 2)
    gradients = torch.ops.aten.convolution_backward(
        cotangent,
        inputs.to(cotangent.dtype),
        weight,
        None,
        stride,
        padding,
        dilation,
        False,
        no_output_padding,
        groups,
        mask,
    )
    return gradients[which]


def scaled(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, keep: Keep | None,
    options: tuple[Any, ...] | None, tensor_cores: bool = False,
) -> Tensor:  # fmt: skip
    """Returns a linear map or a convolution, and multiplies example i's gradient in (weight, bias) by factor[i].

    Args:
        inputs: The layer's inputs.
        weight: Its weight.
        bias: Its bias, or None.
        factor: The factors c_i; None stands for 1.
        keep: Receives (input, cotangent) in the backward pass, and no gradient is summed, if given.
        options: Stride, padding, dilation and groups of a convolution with zero padding; None for a linear map.
        tensor_cores: As for ``weighted_gradients``.
    """
    return _Scaled.apply(inputs, weight, bias, factor, keep, options, tensor_cores)
