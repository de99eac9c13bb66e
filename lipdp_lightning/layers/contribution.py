"""Each example's gradient in one use of a layer: its exact norm, and the weighted sum, without storing the gradients.

One use of a layer adds g_i = sum_p d_ip (x_ip, 1)^T for example i, over output positions p, with patches x_ip and
cotangents d_ip.

The gradient of the weight is sum_i c_i g_i. It is computed as one product in which the rows of the cotangent or of
the input, whichever is smaller, are multiplied by c: no per-sample gradient exists at any time. Sums over many rows are
formed in pieces, which are added in float64. Products of float32 are added in float32, so that every addition rounds by
a share of the partial sum beneath it; over thousands of equal rows with hundreds of positions, these roundings move a
sum by several percent of one example's bound. ``mechanism.allocation.sum_margin`` says what is left of that with pieces
of ``TERMS_OF_A_PIECE`` terms, and pays for it. Where a GPU may use its tensor cores, a kernel adds 64 terms in
float32, and these sums in float64 (``kernels/gpu.py``).

The squared norm of g_i is computed in the way that takes fewer multiplications:

    the product    ||sum_p d_p x_p^T||_F^2, formed for a few examples at a time and dropped;
    Gram matrices  sum_{p,q} <d_p, d_q> <x_p, x_q>.

Norms are upper bounds in spite of rounding. With u = 2^-24, any order of summation and inner products of length n,
a computed product is within n u / (1 - n u) of the exact one, relative to the product of the factors' absolute
values (Higham, Accuracy and Stability of Numerical Algorithms, 3.5). With E = sum over channel groups of
||d||_F^2 (||x||_F^2 + P):

    product   every entry is a sum of P terms, so ||computed - exact|| <= P u' sqrt(E), and the norm of what was
              computed has a relative error of at most m u', where m is the number of terms of its two-stage sum;
              u' = 2 u covers the denominator and the evaluation of these expressions;
    Gram      inner products have lengths o and F, and the sum over P x P has two stages: the result is within
              (o + F + 2 P + 2) u' of the exact square, relative to (sum_p ||d_p|| ||x_p||)^2 <= E.

A second P u' sqrt(E) covers the same rounding in the sum of the contribution itself. The result is also kept
above sqrt(E) / LARGEST_CANCELLATION: if positions cancel further than that, only rounding errors are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.loops import gpu_kernels
from ..kernels.numeric_environment import products_on_tensor_cores

TERMS_OF_A_PIECE = 1 << 14  # rows times positions that one product in float32 adds up, unless one row has more
LARGEST_CANCELLATION = 64.0
LARGEST_INTERMEDIATE = 2**22  # numbers held for one group of examples; it affects speed and memory alone
_ROUNDING = 2.0**-23  # u'
_TERMS = 2**20  # m u' stays below 1/8, as the margins assume


@dataclass
class Contribution:
    """The contribution of one backward pass through one use of a layer to its gradient, not yet summed over examples.

    Attributes:
        inputs: The layer's inputs, padded as the options of a convolution expect it.
        cotangent: The cotangent at the layer's output.
        weight: The layer's weight.
        trains: Whether the weight and the bias are trained.
        options: Stride, padding, dilation and groups of a convolution; None for a linear layer.
    """

    inputs: Tensor
    cotangent: Tensor
    weight: Tensor
    trains: tuple[bool, bool]
    options: tuple[Any, ...] | None

    @property
    def rows(self) -> int:
        return self.cotangent.shape[0]

    def norms(self, views: int = 1) -> Tensor:
        """Returns upper bounds on the norms ||g_i||, in the weight's precision; NaN or infinite if g_i is.

        Args:
            views: The number of consecutive rows that are views of one example; g_i is the mean over them.
        """
        with torch.autocast(self.weight.device.type, enabled=False):
            found = [self._norms(x, d, views) for x, d in self._parts(views)]
        return torch.cat(found) / views if found else self.weight.new_zeros(0)

    def gradients(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns sum_i factor_i g_i for weight and bias; a row of factor zero is left out, even if not finite."""
        inputs, cotangent, kept = self.inputs, self.cotangent, factor != 0
        if not kept.is_cpu or not bool(kept.all()):  # zero times infinity would be NaN; elsewhere, the host would wait
            inputs, cotangent = _only(kept, inputs), _only(kept, cotangent)
        with torch.autocast(self.weight.device.type, enabled=False):
            return weighted_gradients(inputs, cotangent, self.weight, factor, self.trains, self.options)

    def _parts(self, views: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yields patches and cotangents of a few examples: (rows, groups, entries or outputs, positions).

        Patches come in one part, or in bands, one for each row of the kernel.
        """
        inputs, cotangent = self.inputs.to(self.weight.dtype), self.cotangent.to(self.weight.dtype)
        rows = views * max(1, LARGEST_INTERMEDIATE // max(1, self._intermediate(views)))
        for first in range(0, self.rows, rows):
            yield self._unfolded(inputs[first : first + rows], cotangent[first : first + rows])

    def _intermediate(self, views: int) -> int:
        outputs, entries = self.weight.shape[0], math.prod(self.weight.shape[1:])
        positions = views * max(1, self.cotangent[:1].numel() // outputs)
        groups = 1 if self.options is None else int(self.options[3])
        return max(groups * entries * positions, min(groups * positions**2, outputs * entries))

    def _unfolded(self, x: Tensor, d: Tensor) -> tuple[list[Tensor], Tensor]:
        if self.options is None:
            flat_x, flat_d = (t.reshape(len(t), -1, t.shape[-1]).transpose(1, 2).unsqueeze(1) for t in (x, d))
            return [flat_x], flat_d
        stride, padding, dilation, groups = self.options
        kernel, flat_d = tuple(self.weight.shape[2:]), torch.unflatten(d.flatten(2), 1, (groups, -1))
        unfold = _bands if len(kernel) == 2 and stride[0] == 1 else _patches
        return [torch.unflatten(p, 1, (groups, -1)) for p in unfold(x, kernel, stride, padding, dilation)], flat_d

    def _norms(self, parts: list[Tensor], d: Tensor, views: int) -> Tensor:
        with_weight, with_bias = self.trains
        entries, outputs, positions = sum(x.shape[2] for x in parts), d.shape[2], d.shape[3] * views
        terms = entries + outputs + 2 * positions + d.shape[1] + 4
        assert terms < _TERMS, "the rounding of sums this long is not bounded"
        sizes = sum(_over_views(_row_norms(x).square(), views) for x in parts) * with_weight + positions * with_bias
        envelope = (_over_views(_row_norms(d).square(), views) * sizes).sum(1).sqrt()
        bias = _over_views(d.sum(3), views).square().sum(2).sum(1) if with_bias else 0.0
        if not with_weight:
            return _above(bias + torch.zeros_like(envelope), envelope, terms)
        if positions == 1:
            product = (_row_norms(parts[0]) * _row_norms(d)).square().sum(1)
        elif positions * (entries + outputs) < entries * outputs:
            beside, d = [_side_by_side(x, views) for x in parts], _side_by_side(d, views)
            grams = torch.matmul(d.mT, d) * sum(torch.matmul(x.mT, x) for x in beside)
            rounding = terms * _ROUNDING * envelope.square()
            product = grams.sum(3).sum(2).sum(1).clamp_min(0.0) + rounding
        else:
            sums = (_row_norms(_over_views(torch.matmul(d, x.mT), views)).square().sum(1) for x in parts)
            product = sum(sums, start=torch.zeros_like(envelope))
        return _above(product + bias, envelope, terms)


def _bands(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Tensor]:
    """Returns for each row of the kernel its part (examples, channels x columns, positions) of the patches of an image.

    With a stride of 1 between rows, the parts are views of one tensor that holds every row of the image once, so that
    a kernel of 3 x 3 copies 3 numbers for each position and not 9.
    """
    wide = _patches(x, (1, kernel[1]), stride, padding, dilation)[0]
    height = x.shape[2] + 2 * padding[0]
    positions = wide.shape[2] // height * (height - dilation[0] * (kernel[0] - 1))
    step = wide.shape[2] // height * dilation[0]
    return [wide[:, :, row * step : row * step + positions] for row in range(kernel[0])]


def _patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Tensor]:
    """Returns patches (examples, channels x taps, positions) of an input with one or two axes, faster than unfold."""
    padded = F.pad(x, [p for side in reversed(padding) for p in (side, side)]).contiguous()
    shape = zip(padded.shape[2:], kernel, stride, dilation, strict=True)
    positions = [(size - step * (taps - 1) - 1) // jump + 1 for size, taps, jump, step in shape]
    inner = padded.stride()[2:]
    strides = [n * step for n, step in zip(inner, dilation, strict=True)]
    strides += [n * jump for n, jump in zip(inner, stride, strict=True)]
    windows = padded.as_strided((*padded.shape[:2], *kernel, *positions), (*padded.stride()[:2], *strides))
    return [windows.reshape(len(x), x.shape[1] * math.prod(kernel), math.prod(positions))]


def _over_views(values: Tensor, views: int) -> Tensor:
    """Returns the sums over the rows that are views of one example."""
    return values if views == 1 else torch.unflatten(values, 0, (-1, views)).sum(1)


def _side_by_side(parts: Tensor, views: int) -> Tensor:
    """Puts the positions of all views of an example into one axis."""
    if views == 1:
        return parts
    return torch.unflatten(parts, 0, (-1, views)).permute(0, 2, 3, 1, 4).flatten(3)


def _row_norms(rows: Tensor) -> Tensor:
    """Returns Frobenius norms (examples, groups), summed in two stages: rounding then grows with one axis's length."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=3), dim=2)


def _above(square: Tensor, envelope: Tensor, terms: int) -> Tensor:
    rounding = terms * _ROUNDING
    size = square.sqrt() * (1 + rounding) + 2 * rounding * envelope
    return torch.maximum(size, envelope / LARGEST_CANCELLATION)


def _only(rows: Tensor, values: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *(1,) * (values.dim() - 1)), values, torch.zeros_like(values))


# ---- the weighted sum


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


def _rows(factor: Tensor, like: Tensor) -> Tensor:
    return factor.to(like.dtype).reshape(-1, *(1,) * (like.dim() - 1))


def _weigh(cotangent: Tensor, inputs: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns cotangent and input; the smaller one of them is multiplied by the factor."""
    if factor is None:
        return cotangent, inputs
    if cotangent.numel() <= inputs.numel():
        return cotangent * _rows(factor, cotangent), inputs
    return cotangent, inputs * _rows(factor, inputs)


def _weighted_bias(full: Tensor, left: Tensor, factor: Tensor | None, channel: int, kind: torch.dtype) -> Tensor:
    """Returns sum_i c_i sum_p d_ip of that dtype; if the cotangent was weighed, its rows are reused."""
    others = [d for d in range(full.dim()) if d != channel % full.dim()]
    if left is not full or factor is None:
        return left.sum(others, dtype=kind)
    per_example = full.sum(others[1:]) if len(others) > 1 else full
    return factor.to(full.dtype) @ per_example


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
    return conv_gradient(left, right, weight, options, which=1)


def conv_gradient(cotangent: Tensor, inputs: Tensor, weight: Tensor, options: tuple[Any, ...], which: int) -> Tensor:
    """Returns the sum over rows of the gradient of a convolution's weight (1), or the gradient of its input (0)."""
    stride, padding, dilation, groups = options
    if inputs.shape[0] == 0:
        return torch.zeros_like(weight if which else inputs)
    x, mask, no_output_padding = inputs.to(cotangent.dtype), [which == 0, which == 1, False], [0] * (weight.dim() - 2)
    gradients = torch.ops.aten.convolution_backward(
        cotangent, x, weight, None, stride, padding, dilation, False, no_output_padding, groups, mask
    )
    return gradients[which]
