"""Norms of rows, such as examples and the patches that a convolution sees of them, normalised and ordered rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .loops import Fused, cpu_loops, is_traced, usable


def widened(x: Tensor) -> Tensor:
    """Returns x in float32, or as it is in float64.

    A certificate allows for one rounding per operation; a layer of several operations computes in
    float32 and rounds its result once.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def row_norms(rows: Tensor, more: int = 0) -> Tensor:
    """Returns sqrt(||row||^2 + more) of each example, in float32 at least; NaN and infinities propagate.

    Squares are taken and added in float64, where no float32 overflows or is lost.
    """
    found: Tensor = (_row_norms if rows.is_cuda else row_norms_by_torch)(rows, more)
    return found


def row_norms_by_torch(rows: Tensor, more: int) -> Tensor:
    """Computes ``row_norms`` by torch's operations."""
    norms = torch.linalg.vector_norm(rows.unsqueeze(-1).flatten(1), dim=1, dtype=torch.float64)
    if more:
        norms = (norms.square() + more).sqrt()
    return norms.to(torch.promote_types(rows.dtype, torch.float32))


def patch_norms(images: Tensor, counts: Tensor, groups: int, more: int = 0) -> Tensor:
    """Returns the norm of all patches of each image, of the largest group of channels.

    Args:
        images: (examples, channels, ...), already padded.
        counts: the number of patches that hold each pixel.
        groups: the convolution's number of groups of channels; a kernel sees the patches of its own group only.
        more: a number that is added to the squared norm: the number of positions where a bias is trained.
    """
    if not usable(images):
        norms: Tensor = (_patch_norms if images.is_cuda else patch_norms_by_torch)(images, counts, groups, more)
        return norms
    found, shape = torch.empty(images.shape[0], dtype=torch.float32), images.shape
    flat = images.reshape(shape[0], shape[1], math.prod(shape[2:]))
    weights = counts.double().contiguous().view(-1)
    cpu_loops().patch_norms(images.numel(), flat, weights, groups, more, found)
    return found


def patch_norms_by_torch(images: Tensor, counts: Tensor, groups: int, more: int) -> Tensor:
    """Computes ``patch_norms`` by torch's operations."""
    # not a matrix product, which autocast would round
    energy = widened(images).square() * counts.to(torch.promote_types(images.dtype, torch.float32))
    if groups == 1:
        return (energy.flatten(1).sum(1) + more).sqrt()
    return (torch.unflatten(energy, 1, (groups, -1)).flatten(2).sum(2).amax(1) + more).sqrt()


_row_norms, _patch_norms = Fused(row_norms_by_torch), Fused(patch_norms_by_torch)


# ---- rows times factors


def clipped_by_torch(cotangent: Tensor, radius: float) -> Tensor:
    """Returns the rows, each cut to norm ``radius``; a row that is not finite becomes zero."""
    size = row_norms_by_torch(cotangent, 0)
    return _weigh_rows(cotangent, radius / size.clamp_min(radius), size)


def weighed_by_torch(cotangent: Tensor, factor: Tensor) -> Tensor:
    """Returns the rows times their factors; a row whose squared norm or factor is not finite becomes zero."""
    return _weigh_rows(cotangent, factor, row_norms_by_torch(cotangent, 0).square())


def _weigh_rows(cotangent: Tensor, factor: Tensor, size: Tensor) -> Tensor:
    """Multiplies each row by its factor, with one rounding; a row whose size or factor is not finite becomes zero."""
    # infinity times 0 is NaN, and the size of a row that is not finite is NaN or infinity
    finite = (size * factor).abs() < math.inf
    shape = (-1, *(1,) * (cotangent.dim() - 1))
    # a factor in bfloat16 would add its own rounding, beyond the margin of the certificate
    weighed = widened(cotangent) * factor.reshape(shape)
    return torch.where(finite.reshape(shape), weighed, 0.0).to(cotangent.dtype)


clipped, weighed = Fused(clipped_by_torch), Fused(weighed_by_torch)


# ---- normalisation with a floored divisor: (x - mean) / max(floor, standard deviation)


def floored_rows(grouped: Tensor, floor: float) -> Tensor:
    """Normalises ``grouped`` (examples, groups, numbers), each group by itself.

    The gradient is the exact one of this function, whose slope is at most 1 / floor. A constant group becomes zero. On
    a CPU it takes one pass over memory forward, and one backward; on a GPU, what torch compiles from the definitions.
    """
    by_loop = usable(grouped.detach())
    if not grouped.numel() or not (by_loop or (grouped.is_cuda and not is_traced())):
        return floored_by_torch(grouped, floor)
    found: Tensor = _Floored.apply(grouped, floor, by_loop)
    return found


def floored_by_torch(grouped: Tensor, floor: float) -> Tensor:
    """Computes ``floored_rows`` by torch's operations, on any device and in any precision."""
    centred = grouped - grouped.mean(2, keepdim=True)
    # vector_norm has gradient zero at zero, where sqrt(mean square) would give NaN
    deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / math.sqrt(max(1, grouped.shape[2]))
    return centred / deviation.clamp_min(floor)


def pulled_back_by_torch(grouped: Tensor, gradient: Tensor, floor: float) -> Tensor:
    """Returns (g - mean(g) - u mean(u g)) / divisor, the gradient of ``floored_by_torch``, with u for its output.

    The last term is left out where the divisor is the floor.
    """
    centred = grouped - grouped.mean(2, keepdim=True)
    deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / math.sqrt(max(1, grouped.shape[2]))
    divisor = deviation.clamp_min(floor)
    out = centred / divisor
    slope = torch.where(deviation < floor, 0.0, (gradient * out).mean(2, keepdim=True))
    return (gradient - gradient.mean(2, keepdim=True) - out * slope) / divisor


_floored, _pulled_back = Fused(floored_by_torch), Fused(pulled_back_by_torch)


class _Floored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grouped: Tensor, floor: float, by_loop: bool) -> Tensor:
        ctx.floor, ctx.by_loop = floor, by_loop
        if not ctx.by_loop:
            ctx.save_for_backward(grouped)
            found: Tensor = _floored(grouped, floor)
            return found
        examples, groups, numbers = grouped.shape
        out, kept = torch.empty_like(grouped), torch.empty((examples * groups, 3), dtype=torch.float64)
        cpu_loops().normalize(grouped.numel(), grouped.detach().view(-1, numbers), floor, out.view(-1, numbers), kept)
        ctx.save_for_backward(grouped, kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        grouped, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            again = floored_by_torch(grouped, ctx.floor)
            return torch.autograd.grad(again, grouped, gradient, create_graph=True)[0], None, None
        if not ctx.by_loop:
            return _pulled_back(grouped, gradient, ctx.floor), None, None
        (kept,) = rest
        gradient, numbers = gradient.contiguous(), grouped.shape[2]
        out = torch.empty_like(gradient)
        rows, incoming = grouped.detach().view(-1, numbers), gradient.view(-1, numbers)
        cpu_loops().pull_back(gradient.numel(), rows, kept, incoming, out.view(-1, numbers))
        return out, None, None


# ---- pairs of channels in order: the activation MaxMin
#
# torch's maximum and minimum keep both of their arguments for the backward pass and take a dozen passes over memory
# there. Here one byte is kept of each pair, and both directions take one pass, by a loop on a CPU and by what torch
# compiles from the definition on a GPU.


def larger_first(x: Tensor) -> Tensor:
    """Returns ``x`` (batch, channels, ...) with the channels 2k and 2k + 1 in descending order.

    Each example's output is a permutation of its entries, and the gradient is permuted back by the same one, also where
    the two of a pair are equal, so both maps keep norms exactly. A pair with a NaN stays as it is.

    Raises:
        ValueError: If the number of channels is odd.
    """
    if x.shape[1] % 2:  # or channels of different examples would be paired
        raise ValueError(f"{x.shape[1]} channels do not make pairs. HINT: use an even number of channels.")
    if is_traced():
        return ordered_by_torch(x)[0]
    ordered: Tensor = _LargerFirst.apply(x, usable(x.detach()))
    return ordered


def ordered_by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` in order, and for every pair of channels and position whether the two have changed places."""
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    swapped = second > first
    return swapped_by_torch(x, swapped), swapped


def swapped_by_torch(x: Tensor, swapped: Tensor) -> Tensor:
    """Returns ``x`` with the two channels of a pair exchanged where ``swapped`` says so."""
    first, second = torch.unflatten(x, 1, (-1, 2)).unbind(2)
    return torch.stack((torch.where(swapped, second, first), torch.where(swapped, first, second)), 2).flatten(1, 2)


_ordered, _exchanged = Fused(ordered_by_torch), Fused(swapped_by_torch)


class _LargerFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by_loop: bool) -> Tensor:
        if by_loop:
            rows, channels, *rest = x.shape
            out, swapped = torch.empty_like(x), torch.empty((rows, channels // 2, *rest), dtype=torch.bool)
            pairs = (rows * (channels // 2), 2, math.prod(rest))
            cpu_loops().in_order(x.numel(), x.detach().view(pairs), out.view(pairs), swapped.view(pairs[::2]))
        else:
            out, swapped = _ordered(x)
        ctx.save_for_backward(swapped)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (swapped,) = ctx.saved_tensors
        # as a function of its own only where it is to be differentiated in its turn
        found: Tensor = (_Swap.apply if torch.is_grad_enabled() else _swapped)(gradient, swapped)
        return found, None


class _Swap(torch.autograd.Function):
    """Exchanges channels: linear, and its own adjoint, so gradients of every order are the same permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swapped: Tensor) -> Tensor:
        ctx.save_for_backward(swapped)
        return _swapped(x, swapped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (swapped,) = ctx.saved_tensors
        found: Tensor = _Swap.apply(gradient, swapped)
        return found, None


def _swapped(x: Tensor, swapped: Tensor) -> Tensor:
    if not (usable(x) and swapped.is_contiguous()):
        found: Tensor = _exchanged(x, swapped)
        return found
    out, (rows, channels, *rest) = torch.empty_like(x), x.shape
    pairs = (rows * (channels // 2), 2, math.prod(rest))
    cpu_loops().swap(x.numel(), x.detach().view(pairs), swapped.view(pairs[::2]), out.view(pairs))
    return out
