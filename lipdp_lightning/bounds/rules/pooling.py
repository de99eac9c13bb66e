"""Rules of pooling, upsampling and padding, by norms of 1-D matrices or by how often an entry is read or copied.

On the way back, torch adds the cotangents of an entry one by one in the precision of the network (``rounded_sum``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Bound, Operation, Unbounded, Value, module_rule_of, public_number, rule
from .structure import LARGEST_MATRIX, MARGIN, rounded_sum

Size = int | Sequence[int] | None


def _tuple(value: Size, rank: int) -> tuple[int, ...]:
    assert value is not None
    return (value,) * rank if isinstance(value, int) else tuple(value) * (rank if len(value) == 1 else 1)


def _step(stride: Size, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stride; if it is missing, which torch also writes as an empty list, it is the kernel."""
    return _tuple(stride, len(kernel)) if isinstance(stride, int) or stride else kernel


def _along(n: int, apply: Callable[[Tensor], Tensor]) -> tuple[float, int, float]:
    """Returns the norm of a linear map of one axis of n entries, the number of its rows, and its largest column sum.

    The entries of its matrix are not negative, so that its norm is at most the root of the largest row sum times the
    largest column sum (Schur). Unless the matrix is large, its largest singular value is taken where that is smaller.
    """
    with torch.inference_mode(False), torch.enable_grad():
        line = torch.ones((1, 1, n), dtype=torch.float64, requires_grad=True)
        out = apply(line)
        columns = torch.autograd.grad(out.sum(), line)[0]
    rows, largest = out.shape[-1], float(columns.max())
    norm = math.sqrt(largest * float(out.detach().max()))
    if n * rows <= LARGEST_MATRIX:
        matrix = apply(torch.eye(n, dtype=torch.float64)[:, None])[:, 0]
        norm = min(norm, float(np.linalg.norm(matrix.numpy(), 2)))
    return norm, rows, largest


@lru_cache(maxsize=1024)
def _average_axis(
    size: int, kernel: int, stride: int, padding: int, ceil_mode: bool, include_pad: bool, fixed_divisor: bool
) -> float:
    """Returns the norm of average pooling along one axis; torch's 2-D divisor is the product of the axes' divisors."""
    options = (1, kernel), (1, stride), (0, padding), ceil_mode, include_pad, 1 if fixed_divisor else None
    return _along(size, lambda line: F.avg_pool2d(line[:, :, None], *options)[:, :, 0])[0] * MARGIN


@lru_cache(maxsize=1024)
def _adaptive_axis(size: int, out: int) -> tuple[float, int]:
    """Returns the norm of the adaptive average's matrix and the largest number of windows that read one input."""
    reads = np.zeros(size, dtype=np.int64)
    for i in range(out):
        reads[(i * size) // out : -((-(i + 1) * size) // out)] += 1
    return _along(size, lambda line: F.adaptive_avg_pool1d(line, out))[0] * MARGIN, int(reads.max())


def _spatial(x: Value, rank: int) -> tuple[int, ...]:
    if len(x.shape) != rank + 1:
        raise Unbounded(
            f"pooling over {rank} axes was given one example of shape {x.shape}",
            f"give it (batch, channels, {', '.join('HW'[:rank] if rank == 2 else 'L')})",
        )
    return x.shape[1:]


def average_pool(
    rank: int, op: Operation, x: Value, kernel_size: Size, stride: Size = None, padding: Size = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Bound:  # fmt: skip
    """Bounds average pooling by the product of its axes' norms: its matrix is a Kronecker product of theirs."""
    kernel = _tuple(kernel_size, rank)
    steps = _step(stride, kernel)
    axes = zip(_spatial(x, rank), kernel, steps, _tuple(padding, rank), strict=True)
    divided = ceil_mode, count_include_pad, bool(divisor_override)
    lipschitz = math.prod(_average_axis(*axis, *divided) for axis in axes)
    lipschitz /= abs(divisor_override or 1)
    reads = math.prod(-(-width // step) for width, step in zip(kernel, steps, strict=True))
    return Bound(lipschitz * x.norm, lipschitz * rounded_sum(op, reads))


@lru_cache(maxsize=1024)
def _window_reads(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Returns the largest number of windows that read one input; 0 if a window of padding alone would yield -inf."""
    taps = np.arange(out)[:, None] * stride - padding + np.arange(kernel)[None, :] * dilation
    inside = (taps >= 0) & (taps < size)
    return int(np.bincount(taps[inside]).max()) if inside.any(1).all() else 0


def max_pool(
    rank: int, op: Operation, x: Value, kernel_size: Size, stride: Size = None, padding: Size = 0, dilation: Size = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Bound:  # fmt: skip
    """Bounds max pooling: each output copies one input, and at most k windows read an input, so the bound is sqrt(k).

    On each axis k is at most ceil(kernel gcd(stride, dilation) / stride), and less in a small image: it is counted.
    """
    _without_indices(return_indices)
    size, pad = _spatial(x, rank), _tuple(padding, rank)
    kernel, spread = _tuple(kernel_size, rank), _tuple(dilation, rank)
    axes = zip(size, op.output_shape[1:], kernel, _step(stride, kernel), pad, spread, strict=True)
    reads = math.prod(_window_reads(*axis) for axis in axes)
    if reads == 0:
        raise Unbounded("a window holds padding alone and yields minus infinity", "pad less, or dilate less")
    return Bound(math.sqrt(reads) * x.norm, math.sqrt(reads) * rounded_sum(op, reads))


def _without_indices(return_indices: bool) -> None:
    if return_indices:
        raise Unbounded("max pooling with return_indices has no rule", "drop return_indices")


def _adaptive_sizes(rank: int, op: Operation, x: Value) -> list[tuple[float, int]]:
    return [_adaptive_axis(i, o) for i, o in zip(_spatial(x, rank), op.output_shape[1:], strict=True)]


def adaptive_average(rank: int, op: Operation, x: Value, output_size: Any = None) -> Bound:
    """Bounds adaptive average pooling by the product of the axes' norms."""
    norms, reads = map(math.prod, zip(*_adaptive_sizes(rank, op, x), strict=True))
    return Bound(norms * x.norm, norms * rounded_sum(op, int(reads)))


def adaptive_max(rank: int, op: Operation, x: Value, output_size: Any = None, return_indices: bool = False) -> Bound:
    """Bounds adaptive max pooling by the square root of the largest number of windows that read one input."""
    _without_indices(return_indices)
    reads = math.prod(reads for _, reads in _adaptive_sizes(rank, op, x))
    return Bound(math.sqrt(reads) * x.norm, math.sqrt(reads) * rounded_sum(op, reads))


def _register(
    pool: Callable[..., Bound], rank: int, kind: type[nn.Module], *functions: Any, options: tuple[str, ...] = ()
) -> None:
    @rule(*functions)
    @module_rule_of(kind, options=options)
    @wraps(pool)
    def of_rank(*args: Any, **kwargs: Any) -> Bound:
        return pool(rank, *args, **kwargs)


_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode")
_AVERAGE, _MAX = (*_WINDOW, "count_include_pad"), (*_WINDOW, "dilation", "return_indices")
_register(average_pool, 1, nn.AvgPool1d, F.avg_pool1d, options=_AVERAGE)
_register(average_pool, 2, nn.AvgPool2d, F.avg_pool2d, options=(*_AVERAGE, "divisor_override"))
# depending on the model's call, tracing records torch's wrapper of a max pool or the plain function
_register(max_pool, 1, nn.MaxPool1d, F.max_pool1d, torch.max_pool1d, options=_MAX)
_register(max_pool, 2, nn.MaxPool2d, F.max_pool2d, torch.max_pool2d, options=_MAX)
_register(adaptive_average, 1, nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d)
_register(adaptive_average, 2, nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_register(adaptive_max, 1, nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d, options=("return_indices",))
_register(adaptive_max, 2, nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d, options=("return_indices",))


_AXES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear", "bilinear": "linear"}


@lru_cache(maxsize=256)
def _interpolation(
    n: int, size: int | None, scale: float | None, mode: str, corners: bool | None, recompute: bool | None
) -> tuple[float, int, int]:
    """Returns the norm of the matrix that interpolates one axis of n entries, its rows, and reads of one entry at most.

    Rows sum to 1. In float32, torch places a point among n with an error of less than n 2^-22, by which it shifts
    weight between two neighbours.
    """
    options: dict[str, Any] = {
        "size": size, "scale_factor": scale, "mode": mode, "align_corners": corners, "recompute_scale_factor": recompute
    }  # fmt: skip
    norm, rows, largest = _along(n, lambda line: F.interpolate(line, **options))
    if mode != "linear":
        return math.sqrt(largest), rows, round(largest)  # attained where each row reads one entry
    # a hat of sum s is sampled at 2 s + 1 points at most, up to rounding
    return norm * MARGIN * (1 + n * 2.0**-21), rows, 2 * math.ceil(largest) + 2


@rule(F.interpolate)
@module_rule_of(
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d,
    options=("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"),
)  # fmt: skip
def interpolate(
    op: Operation, x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Bound:  # fmt: skip
    """Bounds interpolation by the product of its axes' norms: its matrix is a Kronecker product of theirs."""
    if mode not in _AXES or antialias:
        raise Unbounded(
            f"interpolation with mode={mode!r}, antialias={antialias} has no rule",
            "use nearest or bilinear without antialias, or adaptive average pooling for mode='area'",
        )
    axes = len(x.shape) - 1
    sizes, scales = (tuple(v) if isinstance(v, Sequence) else (v,) * axes for v in (size, scale_factor))
    found = [
        _interpolation(n, s, None if f is None else float(f), _AXES[mode], align_corners, recompute_scale_factor)
        for n, s, f in zip(x.shape[1:], sizes, scales, strict=True)
    ]
    if tuple(rows for _, rows, _ in found) != op.output_shape[1:]:
        raise Unbounded("its axes have other sizes one by one than together", "name the size of the output")
    lipschitz, reads = math.prod(norm for norm, _, _ in found), math.prod(count for _, _, count in found)
    return Bound(lipschitz * x.norm, lipschitz * rounded_sum(op, reads))


@lru_cache(maxsize=256)
def pad_copies(shape: tuple[int, ...], pad: tuple[int, ...], mode: str) -> float:
    """Returns the largest number of copies that padding makes of one entry, over which the gradient is a sum."""
    places = torch.arange(math.prod(shape), dtype=torch.float64).reshape(1, *shape)
    copies = torch.bincount(F.pad(places, pad, mode=mode).flatten().long(), minlength=places.numel())
    places.requires_grad_(True)
    with torch.enable_grad():
        summed = torch.autograd.grad(F.pad(places, pad, mode=mode).sum(), places)[0]
    if not torch.equal(copies.double(), summed.flatten()):
        raise Unbounded(
            f"torch's gradient of {mode} padding by {pad} is not that of what it computes",
            "pad by other widths, or crop with slices",
        )
    return float(copies.max())


def _pad(op: Operation, x: Value, pad: tuple[int, ...], mode: str, value: float | None) -> Bound:
    """Bounds padding: constants are added beside x, and k copies of an entry multiply norms by at most sqrt(k)."""
    if len(pad) // 2 > len(x.shape):
        raise Unbounded("it pads the batch dimension", "pad dimensions of one example only")
    if len(pad) % 2 or not all(isinstance(side, int) for side in pad):
        raise Unbounded(f"its widths {pad} are not pairs of public integers", "give two integers per dimension")
    if mode == "constant":
        # negative padding crops, so that less than all of x may be left
        sizes = (*reversed(x.shape),)
        kept = math.prod(
            max(0, n + min(before, 0) + min(after, 0))
            for n, before, after in zip(sizes, pad[0::2], pad[1::2], strict=False)
        ) * math.prod(sizes[len(pad) // 2 :])
        extra = abs(public_number(value or 0.0)) * math.sqrt(max(0, op.output_numel - kept))
        return Bound(math.hypot(x.norm, extra), 1.0)
    if mode == "circular" and min(pad, default=0) < 0:
        raise Unbounded(
            f"circular padding by {pad} crops on one side, and torch then copies other entries than it accounts for",
            "crop with slices, then pad",
        )
    copies = pad_copies(x.shape, pad, mode)
    return Bound(math.sqrt(copies) * x.norm, math.sqrt(copies) * rounded_sum(op, int(copies)))


@rule(F.pad, torch._C._nn.pad)
def pad_function(
    op: Operation, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Bound:
    return _pad(op, x, tuple(pad), mode, value)


for _mode, _kinds in {
    "constant": (nn.ConstantPad1d, nn.ConstantPad2d),
    "circular": (nn.CircularPad1d, nn.CircularPad2d),
    "reflect": (nn.ReflectionPad1d, nn.ReflectionPad2d),
    "replicate": (nn.ReplicationPad1d, nn.ReplicationPad2d),
}.items():

    @rule(*_kinds)
    def pad_module(op: Operation, x: Value, mode: str = _mode) -> Bound:
        module: Any = op.module
        return _pad(op, x, tuple(module.padding), mode, getattr(module, "value", None))
