"""Transposed convolutions that can measure n_ik and scale their parameter gradient by example.

A transposed convolution is the adjoint of a convolution, so its weight's gradient is that of the convolution with input
and cotangent in each other's place (``bounds.rules.transposed``). Sums over the batch, and exact norms, are therefore
those of a convolution that reads the cotangent.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..bounds.registry import rule
from ..bounds.rules.transposed import transposed_module, transposed_operator
from ..kernels.rows import row_norms
from .contribution import weighted_gradients
from .scaled import Keep, ScaledLayer, convolve


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, keep: Keep | None,
        options: tuple[Any, ...], output_padding: list[int],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(inputs, weight, factor)
        ctx.keep, ctx.options = keep, options
        stride, padding, dilation, groups = options
        function: Any = F.conv_transpose1d if weight.dim() == 3 else F.conv_transpose2d
        outputs: Tensor = function(inputs, weight, bias, stride, padding, output_padding, groups, dilation)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, factor = ctx.saved_tensors
        to_input, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        # without autocast, the sum over the batch is formed in the weight's own precision
        with torch.autocast(cotangent.device.type, enabled=False):
            if to_input:
                grad_input = convolve(cotangent, weight.to(cotangent.dtype), None, ctx.options).to(inputs.dtype)
            if ctx.keep is not None:
                ctx.keep(cotangent, inputs)  # in each other's place, as below
                return grad_input, *(None,) * 6
            if to_weight:
                grad_weight, _ = weighted_gradients(cotangent, inputs, weight, factor, (True, False), ctx.options)
            if to_bias:
                _, grad_bias = weighted_gradients(cotangent, cotangent, weight, factor, (False, True), ctx.options)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def transposed(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, keep: Keep | None,
    options: tuple[Any, ...], output_padding: list[int],
) -> Tensor:  # fmt: skip
    """Returns a transposed convolution, and multiplies example i's gradient in (weight, bias) by factor[i].

    The arguments are those of ``layers.scaled.scaled``; the options are those of the convolution whose adjoint it is.
    """
    return _Transposed.apply(inputs, weight, bias, factor, keep, options, output_padding)


class _ScaledTransposed(ScaledLayer):
    """The code that both ranks share.

    Exact norms are those of the weight alone, so that the layer hands its gradient over if its bias is not trained.
    """

    @property
    def hands_over(self) -> bool:
        """Returns whether the layer's whole gradient goes to its ``gradient_keeper``."""
        return type(self).forward is _ScaledTransposed.forward and not self._trains[1]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self
        assert output_size is None, "the graph has no size of an output that is given with a call"
        factor = self._factor(lambda: self.example_norms(input))
        options = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
        keep, further = self._keep(options), list(layer.output_padding)
        return transposed(input, layer.weight, layer.bias, factor, keep, options, further)

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


# The layers compute what torch's own do, so they share the rule of these.
rule(ScaledConvTranspose1d, ScaledConvTranspose2d)(transposed_module)
