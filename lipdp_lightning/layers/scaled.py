"""Linear and convolution layers that can measure n_ik and scale their parameter gradient by example.

n_ik = sqrt(||patches(x_i)||_F^2 + P) bounds example i's gradient: ||g_ik|| <= ||d_i|| n_ik, where P is the number of
output positions and the bias counts as one more input of value 1. In every other respect the layers are torch's own:
they have the same parameters, state_dict keys and outputs.

A transposed convolution is the adjoint of a convolution, so its weight's gradient is that of the convolution with input
and cotangent in each other's place (``bounds.rules.transposed``). Sums over the batch, and exact norms, are therefore
those of a convolution that reads the cotangent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..bounds.registry import rule
from ..bounds.rules.linear import conv_module, linear_module
from ..bounds.rules.transposed import transposed_module, transposed_operator
from ..kernels.rows import patch_norms, row_norms
from ..norms.conv import coverage, output_size
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

    def _mapped(self, inputs: Tensor, affine: Affine, long: bool, norms: Callable[[], Tensor]) -> Tensor:
        """Returns an affine map of the inputs; torch's own, if it is not ``long`` and nobody asks for more."""
        layer: Any = self
        cores = self.tensor_cores and inputs.is_cuda and affine.further is None
        plain, function = not (long or cores or under_autocast(inputs)), affine.function(layer.weight.dim())
        keep, factor = self._keep(affine.options), self._factor(norms)
        if plain and keep is None and factor is None:
            return function(inputs, layer.weight, layer.bias)
        return scaled(inputs, layer.weight, layer.bias, factor, keep, affine, cores)

    def _factor(self, norms: Callable[[], Tensor]) -> Tensor | None:
        """Counts a use that may train the layer, and returns its factors, if there are any."""
        scaler, counter = self.gradient_scaler, self.use_counter
        if (scaler is None and counter is None) or not torch.is_grad_enabled() or not any(self._trains):
            return None
        # the scaler holds numbers that change with every step: a graph that contained them would be compiled every time
        return (_apart if torch.compiler.is_compiling() else _reported)(scaler, norms, counter)

    def _keep(self, options: tuple[Any, ...] | None) -> Keep | None:
        keeper, weight, trains = self.gradient_keeper, cast(Tensor, self.weight), self._trains
        if keeper is None or not torch.is_grad_enabled() or not any(trains):
            return None

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
def _reported(
    scaler: GradientScaler | None, norms: Callable[[], Tensor], counter: Callable[[], None] | None
) -> Tensor | None:
    if counter is not None:
        counter()
    return None if scaler is None else scaler(norms())


_apart: Callable[..., Tensor | None] = torch.compiler.disable(_reported)


def under_autocast(input: Tensor) -> bool:
    """Returns whether torch's own layers would round the gradient's sum over the batch to the autocast dtype."""
    return torch.is_autocast_enabled(input.device.type)


@dataclass(frozen=True)
class Affine:
    """The linear part of a layer, as a function of its inputs and weight.

    Attributes:
        options: Stride, padding, dilation and groups of a convolution with zero padding; None for a linear map.
        further: The output padding, if the map is the adjoint of the convolution.
    """

    options: tuple[Any, ...] | None = None
    further: list[int] | None = None

    def function(self, rank: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """Returns torch's function of inputs, weight and bias, for a weight with so many dimensions."""
        if self.options is None:
            return F.linear
        stride, padding, dilation, groups = self.options
        named = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if self.further is None:
            return partial(F.conv1d if rank == 3 else F.conv2d, **named)
        transposed: Any = F.conv_transpose1d if rank == 3 else F.conv_transpose2d
        return partial(transposed, output_padding=self.further, **named)

    def to_input(self, cotangent: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the inputs."""
        if self.options is None:
            return cotangent @ weight
        if self.further is None:
            return conv_gradient(cotangent, inputs, weight, self.options, which=0)
        return Affine(self.options).function(weight.dim())(cotangent, weight, None)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, keep: Keep | None,
        affine: Affine, tensor_cores: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(inputs, weight, factor)
        ctx.keep, ctx.affine, ctx.tensor_cores = keep, affine, tensor_cores
        return affine.function(weight.dim())(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, factor = ctx.saved_tensors
        to_input, to_weight, to_bias, *_ = ctx.needs_input_grad
        options, adjoint = ctx.affine.options, ctx.affine.further is not None
        grad_input = grad_weight = grad_bias = None
        # without autocast, the sum over the batch is formed in the weight's own precision
        with torch.autocast(cotangent.device.type, enabled=False):
            if to_input:
                grad_input = ctx.affine.to_input(cotangent, inputs, weight.to(cotangent.dtype)).to(inputs.dtype)
            x, d = (cotangent, inputs) if adjoint else (inputs, cotangent)
            if ctx.keep is not None:
                ctx.keep(x, d)
            elif to_weight or to_bias:
                trains = (to_weight, to_bias and not adjoint)
                grad_weight, grad_bias = weighted_gradients(x, d, weight, factor, trains, options, ctx.tensor_cores)
                if adjoint and to_bias:  # the bias belongs to the outputs, which the convolution reads
                    _, grad_bias = weighted_gradients(cotangent, cotangent, weight, factor, (False, True), options)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def scaled(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, keep: Keep | None,
    affine: Affine, tensor_cores: bool = False,
) -> Tensor:  # fmt: skip
    """Returns an affine map of the inputs, and multiplies example i's gradient in (weight, bias) by factor[i].

    Args:
        inputs: The layer's inputs.
        weight: Its weight.
        bias: Its bias, or None.
        factor: The factors c_i; None stands for 1.
        keep: Receives (input, cotangent) in the backward pass, and no gradient is summed, if given.
        affine: The linear part.
        tensor_cores: As for ``weighted_gradients``.
    """
    return _Scaled.apply(inputs, weight, bias, factor, keep, affine, tensor_cores)


class ScaledLinear(ScaledLayer, nn.Linear):
    """nn.Linear whose parameter gradient can be scaled by example.

    An input of shape (batch, positions..., features) has P = prod(positions).
    """

    def forward(self, input: Tensor) -> Tensor:
        long = input.numel() > TERMS_OF_A_PIECE * self.in_features
        return self._mapped(input, Affine(), long, lambda: self.example_norms(input))

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
        pixels = [size + 2 * more for size, more in zip(padded.shape[2:], padding, strict=True)]
        long = padded.shape[0] * math.prod(pixels) > TERMS_OF_A_PIECE  # no fewer than the positions of the output
        return self._mapped(padded, Affine(options), long, lambda: self._norms_of_padded(padded, padding))

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


class _ScaledTransposed(ScaledLayer):
    """The code that both ranks of transposed convolutions share."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self
        assert output_size is None, "the graph has no size of an output that is given with a call"
        options = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
        affine = Affine(options, list(layer.output_padding))
        return self._mapped(input, affine, True, lambda: self.example_norms(input))

    def example_norms(self, input: Tensor) -> Tensor:
        """Returns n_ik = sqrt(kappa^2 ||x_i||^2 + P), the bound of the certificate for this example."""
        layer: Any = self
        with_weight, with_bias = self._trains
        sizes = zip(
            input.shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding,
            strict=True,
        )  # fmt: skip
        size = tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in sizes)
        operator = transposed_operator(size, layer.stride, layer.padding, layer.dilation, layer.groups)
        rows = row_norms(input) * (operator.deviation_factor(layer.weight) * with_weight)
        return torch.hypot(rows, rows.new_tensor(math.sqrt(math.prod(size)) * with_bias))


class ScaledConvTranspose1d(_ScaledTransposed, nn.ConvTranspose1d):
    """nn.ConvTranspose1d whose parameter gradient can be scaled by example."""


class ScaledConvTranspose2d(_ScaledTransposed, nn.ConvTranspose2d):
    """nn.ConvTranspose2d whose parameter gradient can be scaled by example."""


def hands_over(layer: ScaledLayer) -> bool:
    """Returns whether the layer's whole gradient goes to its ``gradient_keeper``: its forward pass is defined here.

    Exact norms of a transposed convolution are those of its weight alone, so that its bias must not be trained.
    """
    forward = type(layer).forward
    adjoint = forward is _ScaledTransposed.forward and not layer._trains[1]
    return adjoint or forward in (ScaledLinear.forward, _ScaledConv.forward)


# The layers compute what torch's own do, so they share the rules of these.
rule(ScaledLinear)(linear_module)
rule(ScaledConv1d, ScaledConv2d)(conv_module)
rule(ScaledConvTranspose1d, ScaledConvTranspose2d)(transposed_module)
