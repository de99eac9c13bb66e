"""Rules of PReLU, extremes of two, running sums, logsumexp, upsampling, and contractions with a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..registry import module_rule_of, rule
from ..values import Bound, Constant, Operation, ParameterUse, Unbounded, Value, full_precision, public_number
from .pooling import LARGEST_MATRIX, MARGIN
from .structure import Operand, _real, add, rounded_sum


@rule(torch.prelu, F.prelu, "prelu")
def prelu(op: Operation, x: Value, weight: Constant | nn.Parameter) -> Bound:
    """Bounds PReLU by its steepest slope.

    The gradient of a channel's slope is the inner product of the cotangent with the channel's negative entries; by
    Cauchy and Schwarz, the slopes' gradients together have a norm of at most ||d|| ||x||.
    """
    if not isinstance(weight, Constant | nn.Parameter):
        raise Unbounded("a slope that depends on the example is a product of activations", "give a constant slope")
    slopes = weight if isinstance(weight, nn.Parameter) else weight.tensor
    constant = max(1.0, public_number(float(_real(slopes).abs().max())))
    trained = isinstance(weight, nn.Parameter) and weight.requires_grad
    return Bound(constant * x.norm, constant, (ParameterUse((slopes,), x.norm),) if trained else ())


@rule(nn.PReLU)
def prelu_module(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, nn.PReLU)
    return prelu(op, x, op.module.weight)


@rule(torch.maximum, torch.minimum, "maximum", "minimum")
def extreme_of_two(op: Operation, input: Operand, other: Operand) -> Bound:
    """Bounds the larger or smaller entry of two.

    Each entry of the output is one of the two, or their mean where they tie and share the gradient. For every
    cotangent d, the parts of d that the operands receive have squares that add up to at most ||d||^2, and the output's
    square is at most the sum of the operands' squares. So operands combine as the inputs of cat do, by root of squares,
    each times the root of the number of copies that broadcasting makes.
    """
    both = add(op, input, other)
    norm = math.hypot(*(add(op, operand, 0.0).norm for operand in (input, other)))
    return Bound(norm, both.lipschitz, both.uses, quadrature=True)


@rule("cumsum", torch.cumsum)
def running_sum(op: Operation, x: Value, dim: int, dtype: torch.dtype | None = None) -> Bound:
    """Bounds running sums over n entries by the norm of the triangular matrix of ones, 1 / (2 sin(pi / (4 n + 2))).

    The inverse of its product with its transpose is tridiagonal, with the eigenvalues 4 sin(pi (2 k - 1) / (4 n + 2))^2
    for k = 1, ..., n.
    """
    full_precision(dtype)
    n = math.prod(x.shape[d] for d in op.inner_dims(dim, len(x.shape)))
    lipschitz = MARGIN / (2 * math.sin(math.pi / (4 * n + 2)))
    return Bound(lipschitz * x.norm, lipschitz)


@rule("logsumexp", torch.logsumexp)
def log_sum_exp(op: Operation, x: Value, dim: int | Sequence[int], keepdim: bool = False) -> Bound:
    """Bounds logsumexp over n entries: its gradient is a softmax, of norm at most 1, and it is ln n at zero."""
    n = math.prod(x.shape[d] for d in op.inner_dims(dim, len(x.shape)))
    return Bound(x.norm + math.sqrt(op.output_numel) * math.log(n), 1.0)


_AXES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear", "bilinear": "linear"}


@lru_cache(maxsize=256)
def _interpolation(
    n: int, size: int | None, scale: float | None, mode: str, corners: bool | None, recompute: bool | None
) -> tuple[float, int, int]:
    """Returns the norm of the matrix that interpolates one axis of n entries, its rows, and reads of one entry at most.

    Rows are non-negative and sum to 1, so the norm is at most the root of the largest column sum (Schur), which is
    attained where each row reads one entry. Else it is the largest singular value, unless the matrix is large. In
    float32, torch places a point among n with an error of less than n 2^-22, by which it shifts weight between two
    neighbours.
    """
    options: dict[str, Any] = {
        "size": size, "scale_factor": scale, "mode": mode, "align_corners": corners, "recompute_scale_factor": recompute
    }  # fmt: skip
    line = torch.zeros((1, 1, n), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        out = F.interpolate(line, **options)
        columns = torch.autograd.grad(out.sum(), line)[0]
    rows, largest = out.shape[-1], float(columns.max())
    norm = math.sqrt(largest)
    if mode != "linear":
        return norm, rows, round(largest)
    if n * rows <= LARGEST_MATRIX:
        matrix = F.interpolate(torch.eye(n, dtype=torch.float64)[:, None], **options)[:, 0]
        norm = min(norm, float(np.linalg.norm(matrix.numpy(), 2)))
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


@lru_cache(maxsize=16)
def _spectral_norm(entries: bytes, rows: int) -> float:
    return float(np.linalg.norm(np.frombuffer(entries).reshape(rows, -1), 2)) * MARGIN


@rule(torch.einsum)
def contraction(op: Operation, equation: str, *operands: Any) -> Bound:
    """Bounds an einsum of one activation with a constant, which is linear, by the norm of its matrix.

    The matrix holds entries of the constant, so that rounding the constant changes it as it changes a weight. A label
    of the activation that is in the output and not in the constant only repeats the matrix, so the matrix is built with
    one entry along it.
    """
    if sum(isinstance(v, Value) for v in operands) > 1:
        raise Unbounded("a product of activations is not Lipschitz", "contract one activation with a constant")
    if len(operands) > 2:
        raise Unbounded("it contracts several constants", "contract the constants first")
    if any(isinstance(v, nn.Parameter) and v.requires_grad for v in operands):
        raise Unbounded("it has no rule for a trained weight", "use nn.Linear, or torch.nn.functional.linear")
    terms, arrow, output = equation.replace(" ", "").partition("->")
    labels, place = terms.split(","), next(i for i, v in enumerate(operands) if isinstance(v, Value))
    own, others = labels.pop(place), "".join(labels)
    x, example = operands[place], own[0]
    if not arrow or "." in equation or own.count(example) > 1 or example in others or output[0] != example:
        raise Unbounded(
            f"the equation {equation!r} does not name the batch as the first label of the activation and of the output "
            "alone",
            "write the equation in full with ->, without '...', as in 'bi,ij->bj'",
        )
    if not set(others) <= set(own + output):
        raise Unbounded(f"{equation!r} sums the constant by itself", "sum the constant first")
    constants = [_real(v.tensor if isinstance(v, Constant) else v).cpu() for v in operands if not isinstance(v, Value)]
    repeats = set(output) - set(others)
    sizes = [1 if label in repeats else n for label, n in zip(own[1:], x.shape, strict=True)]
    columns = math.prod(sizes)
    repeated = math.prod(n for label, n in dict(zip(own[1:], x.shape, strict=True)).items() if label in repeats)
    if columns * op.output_numel > LARGEST_MATRIX * repeated:
        raise Unbounded("its matrix is too large for a norm", "use nn.Linear, or smaller constants")
    basis = torch.eye(columns, dtype=torch.float64).reshape(columns, *sizes)
    matrix = torch.einsum(equation, *constants[:place], basis, *constants[place:]).reshape(columns, -1)
    rounding = max(0.0, op.norms.vector_norm(matrix) - float(torch.linalg.vector_norm(matrix)))
    lipschitz = _spectral_norm(matrix.contiguous().numpy().tobytes(), columns) + rounding
    return Bound(lipschitz * x.norm, lipschitz)
