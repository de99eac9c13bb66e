"""Linear and convolution layers that can measure n_ik and scale their parameter gradient by example.

n_ik = sqrt(||patches(x_i)||_F^2 + P) bounds example i's gradient: ||g_ik|| <= ||d_i|| n_ik, where P is the number of
output positions and the bias counts as one more input of value 1. In every other respect the layers are torch's own:
they have the same parameters, state_dict keys and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..bounds.registry import rule
from ..bounds.rules.linear import conv_module, linear_module
from ..kernels.rows import patch_norms, row_norms
from ..norms.geometry import coverage, output_size
from .contribution import TERMS_OF_A_PIECE, Contribution, conv_gradient, weighted_gradients

GradientScaler = Callable[[Tensor], Tensor | None]
GradientKeeper = Callable[[Contribution], None]
Keep = Callable[[Tensor, Tensor], None]


class ScaledLayer(nn.Module):
    """A layer that reports to the mechanism.

    Attributes:
        gradient_scaler: Maps the norms n_ik of a batch to factors c_ik. If it returns None, it has only read the norms,
            and the gradient is not scaled.
        gradient_keeper: Receives the layer's :class:`Contribution` in the backward pass; the layer then adds nothing to
            ``grad`` itself.
        use_counter: Is called at each use of the layer that may train it.
        tensor_cores: Whether a GPU may round the factors of the weight's gradient to TF32.
    """

    scales_gradient = True
    set_in_steps = ("gradient_scaler", "gradient_keeper", "use_counter", "tensor_cores")
    gradient_scaler: GradientScaler | None = None
    gradient_keeper: GradientKeeper | None = None
    use_counter: Callable[[], None] | None = None
    tensor_cores = False

    def report_to(
        self,
        scaler: GradientScaler | None = None,
        keeper: GradientKeeper | None = None,
        counter: Callable[[], None] | None = None,
    ) -> None:
        """Sets the receivers of this layer's norms, gradients and uses; without arguments, there are none."""
        self.gradient_scaler, self.gradient_keeper, self.use_counter = scaler, keeper, counter

    def _factor(self, norms: Callable[[], Tensor]) -> Tensor | None:
        scaler, counter = self.gradient_scaler, self.use_counter
        if scaler is None or not torch.is_grad_enabled() or not any(self._trains):
            return None
        # the scaler holds numbers that change with every step: a graph that contained them would be compiled every time
        return (_apart if torch.compiler.is_compiling() else _scaled)(scaler, norms, counter)

    def _keep(self, options: tuple[Any, ...] | None) -> Keep | None:
        keeper = self.gradient_keeper
        counter = self.use_counter if self.gradient_scaler is None else None  # a scaler's uses are counted with it
        if (keeper is None and counter is None) or not torch.is_grad_enabled() or not any(trains := self._trains):
            return None
        if counter is not None:
            (_counted_apart if torch.compiler.is_compiling() else _counted)(counter)
        if keeper is None:
            return None
        weight: Any = self.weight

        def keep(inputs: Tensor, cotangent: Tensor) -> None:
            keeper(Contribution(inputs.detach(), cotangent.detach(), weight.detach(), trains, options))

        return keep

    @property
    def _trains(self) -> tuple[bool, bool]:
        weight: Any = self.weight
        bias: Any = self.bias
        return weight.requires_grad, bias is not None and bias.requires_grad


reports_of = attrgetter("gradient_scaler", "gradient_keeper", "use_counter", "tensor_cores")
"""Returns the receivers that ``ScaledLayer.report_to`` has set, and whether tensor cores may form the sum."""


@torch.no_grad()
def _scaled(
    scaler: GradientScaler, norms: Callable[[], Tensor], counter: Callable[[], None] | None = None
) -> Tensor | None:
    if counter is not None:
        counter()
    return scaler(norms())


def _counted(counter: Callable[[], None]) -> None:
    counter()


_counted_apart: Callable[..., None] = torch.compiler.disable(_counted)
_apart: Callable[..., Tensor | None] = torch.compiler.disable(_scaled)


def under_autocast(input: Tensor) -> bool:
    """Returns whether torch's own layers would round the gradient's sum over the batch to the autocast dtype."""
    return torch.is_autocast_enabled(input.device.type)


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
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, factor = ctx.saved_tensors
        to_input, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        # without autocast, the sum over the batch is formed in the weight's own precision
        with torch.autocast(cotangent.device.type, enabled=False):
            if to_input:
                cast, linear = weight.to(cotangent.dtype), ctx.options is None
                found = cotangent @ cast if linear else conv_gradient(cotangent, inputs, cast, ctx.options, which=0)
                grad_input = found.to(inputs.dtype)
            if ctx.keep is not None:
                ctx.keep(inputs, cotangent)
            elif to_weight or to_bias:
                grad_weight, grad_bias = weighted_gradients(
                    inputs, cotangent, weight, factor, (to_weight, to_bias), ctx.options, ctx.tensor_cores
                )
        return grad_input, grad_weight, grad_bias, None, None, None, None


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


class ScaledLinear(ScaledLayer, nn.Linear):
    """nn.Linear whose parameter gradient can be scaled by example.

    An input of shape (batch, positions..., features) has P = prod(positions).
    """

    def forward(self, input: Tensor) -> Tensor:
        keep, cores = self._keep(None), self.tensor_cores and input.is_cuda
        long = input.numel() > TERMS_OF_A_PIECE * self.in_features
        plain = keep is None and not (long or cores or under_autocast(input))
        factor = self._factor(lambda: self.example_norms(input))
        if plain and factor is None:
            return F.linear(input, self.weight, self.bias)
        return scaled(input, self.weight, self.bias, factor, keep, None, cores)

    def example_norms(self, input: Tensor) -> Tensor:
        with_weight, with_bias = self._trains
        positions = math.prod(input.shape[1:-1]) * with_bias
        return row_norms(input, positions) if with_weight else _alike(input, positions)


def _alike(input: Tensor, positions: int) -> Tensor:
    """Returns the norms of a layer whose bias alone is trained: they are the same for all examples."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    return input.new_full((input.shape[0],), math.sqrt(positions), dtype=dtype)


@lru_cache(maxsize=256)
def _coverage(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], device: torch.device,
) -> tuple[Tensor, int]:  # fmt: skip
    """Returns the number of patches that hold each pixel of a zero-padded input, and that of output positions."""
    counts = coverage(kernel, stride, dilation, padding, "zeros", size)
    counts = counts if device.type == "cpu" else counts.float()  # the CPU's loops read float64, which some devices lack
    return counts.to(device), math.prod(output_size(kernel, stride, dilation, padding, "zeros", size))


class _ScaledConv(ScaledLayer):
    """The code that both ranks share; any padding other than zeros is done before the convolution."""

    def forward(self, input: Tensor) -> Tensor:
        padded, padding = self._padded(input)
        layer: Any = self
        options = (list(layer.stride), list(padding), list(layer.dilation), layer.groups)
        keep = self._keep(options)
        pixels = [size + 2 * more for size, more in zip(padded.shape[2:], padding, strict=True)]
        long = padded.shape[0] * math.prod(pixels) > TERMS_OF_A_PIECE  # no fewer than the positions of the output
        cores = self.tensor_cores and padded.is_cuda
        plain = keep is None and not (long or cores or under_autocast(padded))
        factor = self._factor(lambda: self._norms_of_padded(padded, padding))
        if plain and factor is None:
            return convolve(padded, layer.weight, layer.bias, options)
        return scaled(padded, layer.weight, layer.bias, factor, keep, options, cores)

    def example_norms(self, input: Tensor) -> Tensor:
        return self._norms_of_padded(*self._padded(input))

    def _padded(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        layer: Any = self
        sides = tuple(layer._reversed_padding_repeated_twice)
        symmetric = sides[0::2] == sides[1::2]
        if layer.padding_mode == "zeros" and symmetric:
            return input, tuple(reversed(sides[0::2]))
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        return F.pad(input, sides, mode=mode), (0,) * (layer.weight.dim() - 2)

    def _norms_of_padded(self, padded: Tensor, padding: tuple[int, ...]) -> Tensor:
        """Returns the norms n_ik; output channels of a group read its inputs alone, so the largest group counts."""
        layer: Any = self
        with_weight, with_bias = self._trains
        counts, positions = _coverage(
            tuple(padded.shape[2:]), layer.kernel_size, layer.stride, padding, layer.dilation, padded.device
        )
        if not with_weight:
            return _alike(padded, positions * with_bias)
        return patch_norms(padded, counts, layer.groups, positions * with_bias)


class ScaledConv1d(_ScaledConv, nn.Conv1d):
    """nn.Conv1d whose parameter gradient can be scaled by example."""


class ScaledConv2d(_ScaledConv, nn.Conv2d):
    """nn.Conv2d whose parameter gradient can be scaled by example."""


def hands_over(layer: ScaledLayer) -> bool:
    """Returns whether the layer's whole gradient goes to its ``gradient_keeper``: its forward pass is defined here."""
    return type(layer).forward in (ScaledLinear.forward, _ScaledConv.forward)


# The layers compute what torch's own do, so they share the rules of these.
rule(ScaledLinear)(linear_module)
rule(ScaledConv1d, ScaledConv2d)(conv_module)
