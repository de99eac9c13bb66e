"""Pooling: average pools by the exact norms of their 1-D matrices, max pools by how often a pixel is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..registry import rule
from ..values import Bound, Operation, Unbounded, Value

MARGIN = 1 + 1e-9  # over the rounding of a float64 SVD
LARGEST_MATRIX = 2**20  # entries of a 1-D pooling matrix whose SVD is taken
Size = int | Sequence[int] | None


def _tuple(value: Size, rank: int) -> tuple[int, ...]:
    assert value is not None
    return (value,) * rank if isinstance(value, int) else tuple(value) * (rank if len(value) == 1 else 1)


def _step(stride: Size, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """A missing stride is the kernel; torch also writes it as an empty list."""
    return _tuple(stride, len(kernel)) if isinstance(stride, int) or stride else kernel


@lru_cache(maxsize=1024)
def _average_axis(
    size: int, out: int, kernel: int, stride: int, padding: int, include_pad: bool, fixed_divisor: bool
) -> float:
    """Largest singular value of the 1-D pooling matrix, with torch's own rules for the divisor.

    A window that ceil_mode pushes over the padded edge divides by its part inside the padded input, or,
    with include_pad off, by its part inside the input. torch's 2-D divisor is the product of the axes'.
    """
    windows = []
    for i in range(out):
        start = i * stride - padding
        end = min(start + kernel, size + padding)
        low, high = max(start, 0), min(end, size)
        divisor = 1 if fixed_divisor else (end - start if include_pad else high - low)
        if high > low:
            windows.append((low, high, 1.0 / divisor))
    return _windows_norm(windows, size)


def _windows_norm(windows: list[tuple[int, int, float]], size: int) -> float:
    """Norm of the matrix whose rows hold one value on [low, high): exact, or Schur's bound when it is large."""
    if not windows:
        return 0.0
    if len(windows) * size <= LARGEST_MATRIX:
        matrix = np.zeros((len(windows), size))
        for row, (low, high, value) in zip(matrix, windows, strict=True):
            row[low:high] = value
        return float(np.linalg.norm(matrix, 2)) * MARGIN
    columns = np.zeros(size)
    for low, high, value in windows:
        columns[low:high] += value
    widest_row = max((high - low) * value for low, high, value in windows)
    return math.sqrt(widest_row * float(columns.max())) * MARGIN


@lru_cache(maxsize=1024)
def _adaptive_axis(size: int, out: int) -> tuple[float, int]:
    """Norm of the adaptive average's matrix and the largest number of windows that read one input."""
    bounds = [((i * size) // out, -((-(i + 1) * size) // out)) for i in range(out)]
    reads = np.zeros(size, dtype=np.int64)
    for low, high in bounds:
        reads[low:high] += 1
    return _windows_norm([(low, high, 1.0 / (high - low)) for low, high in bounds], size), int(reads.max())


def _spatial(x: Value, rank: int) -> tuple[int, ...]:
    if len(x.shape) != rank + 1:
        raise Unbounded(
            f"pooling over {rank} axes was given one example of shape {x.shape}",
            f"give it (batch, channels, {', '.join('HW'[:rank] if rank == 2 else 'L')})",
        )
    return x.shape[1:]


def average_pool(
    op: Operation,
    x: Value,
    rank: int,
    kernel_size: Size,
    stride: Size = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Bound:
    """L = product of the axes' norms: the pooling matrix is a Kronecker product of its axes' matrices."""
    size = _spatial(x, rank)
    kernel = _tuple(kernel_size, rank)
    step = _step(stride, kernel)
    pad = _tuple(padding, rank)
    out = op.output_shape[1:]
    lipschitz = 1.0
    for axis in range(rank):
        lipschitz *= _average_axis(
            size[axis],
            out[axis],
            kernel[axis],
            step[axis],
            pad[axis],
            count_include_pad,
            bool(divisor_override),
        )
    if divisor_override:
        lipschitz /= abs(divisor_override)
    return Bound(lipschitz * x.norm, lipschitz)


@lru_cache(maxsize=1024)
def _window_reads(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Largest number of windows that read one input; 0 if a window holds padding alone, where torch yields -inf."""
    taps = np.arange(out)[:, None] * stride - padding + np.arange(kernel)[None, :] * dilation
    inside = (taps >= 0) & (taps < size)
    return int(np.bincount(taps[inside]).max()) if inside.any(1).all() else 0


def max_pool(
    op: Operation,
    x: Value,
    rank: int,
    kernel_size: Size,
    stride: Size = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Bound:
    """sqrt(overlap): each output copies one input, and an input is read by at most ``overlap`` windows.

    Per axis these are at most ceil(k gcd(s, d) / s), and fewer in a small image: they are counted.
    """
    if return_indices:
        raise Unbounded("max pooling with return_indices has no rule", "drop return_indices")
    size, pad = _spatial(x, rank), _tuple(padding, rank)
    kernel, spread = _tuple(kernel_size, rank), _tuple(dilation, rank)
    step = _step(stride, kernel)
    axes = zip(size, op.output_shape[1:], kernel, step, pad, spread, strict=True)
    overlap = math.prod(_window_reads(*axis) for axis in axes)
    if overlap == 0:
        raise Unbounded("a window holds padding alone and yields minus infinity", "pad less, or dilate less")
    return Bound(math.sqrt(overlap) * x.norm, math.sqrt(overlap))


def _adaptive_sizes(op: Operation, x: Value, rank: int) -> list[tuple[float, int]]:
    return [_adaptive_axis(i, o) for i, o in zip(_spatial(x, rank), op.output_shape[1:], strict=True)]


def adaptive_average(op: Operation, x: Value, rank: int) -> Bound:
    lipschitz = math.prod(norm for norm, _ in _adaptive_sizes(op, x, rank))
    return Bound(lipschitz * x.norm, lipschitz)


def adaptive_max(op: Operation, x: Value, rank: int, return_indices: bool) -> Bound:
    if return_indices:
        raise Unbounded("max pooling with return_indices has no rule", "drop return_indices")
    lipschitz = math.sqrt(math.prod(reads for _, reads in _adaptive_sizes(op, x, rank)))
    return Bound(lipschitz * x.norm, lipschitz)


def _register(rank: int) -> None:
    average_module = (nn.AvgPool1d, nn.AvgPool2d)[rank - 1]
    max_module = (nn.MaxPool1d, nn.MaxPool2d)[rank - 1]

    @rule(average_module)
    def average_of_module(op: Operation, x: Value) -> Bound:
        m: Any = op.module
        return average_pool(
            op, x, rank, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad,
            getattr(m, "divisor_override", None),
        )  # fmt: skip

    @rule((F.avg_pool1d, F.avg_pool2d)[rank - 1])
    def average_function(op: Operation, input: Value, *args: Any, **kwargs: Any) -> Bound:
        return average_pool(op, input, rank, *args, **kwargs)

    @rule(max_module)
    def max_of_module(op: Operation, x: Value) -> Bound:
        m: Any = op.module
        return max_pool(op, x, rank, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)

    # fx sees the boolean-dispatch wrapper or the plain function, depending on how the model calls it
    names: Any = ((F.max_pool1d, torch.max_pool1d), (F.max_pool2d, torch.max_pool2d))[rank - 1]

    @rule(*names)
    def max_function(op: Operation, input: Value, *args: Any, **kwargs: Any) -> Bound:
        return max_pool(op, input, rank, *args, **kwargs)

    @rule(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)[rank - 1],
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[rank - 1],
    )
    def adaptive_average_rule(op: Operation, x: Value, *args: Any, **kwargs: Any) -> Bound:
        return adaptive_average(op, x, rank)

    @rule((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)[rank - 1])
    def adaptive_max_rule(op: Operation, x: Value) -> Bound:
        m: Any = op.module
        return adaptive_max(op, x, rank, m.return_indices)

    @rule((F.adaptive_max_pool1d, F.adaptive_max_pool2d)[rank - 1])
    def adaptive_max_function(op: Operation, x: Value, output_size: Any, return_indices: bool = False) -> Bound:
        return adaptive_max(op, x, rank, return_indices)


_register(1)
_register(2)
