"""Rules of arithmetic, shapes and views, which combine bounds of several operands (guarantee page, slot rule)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..registry import (
    BatchNumber,
    Bound,
    Constant,
    Operation,
    ParameterUse,
    Unbounded,
    Value,
    counts_examples,
    full_precision,
    module_rule_of,
    public_number,
    rule,
)

MARGIN = 1 + 1e-9  # covers the rounding of a float64 SVD
LARGEST_MATRIX = 2**20  # the most entries of a matrix whose SVD is computed for a rule
Operand = Value | Constant | nn.Parameter | float | int


def real(constant: torch.Tensor) -> torch.Tensor:
    """Returns a constant in float64, and refuses a complex one, which would lose its imaginary part."""
    if constant.is_complex():
        raise Unbounded(f"it computes with a constant of {constant.dtype}", "compute with real numbers")
    return constant.detach().double()


def _constant_norm(op: Operation, constant: torch.Tensor) -> float:
    """Returns the norm of a constant that is broadcast to one example's output."""
    if constant.is_complex():
        real(constant)
    copies = max(1, op.output_numel // max(1, constant.numel()))
    return math.sqrt(copies) * op.norms.vector_norm(constant)


def _copies(op: Operation, value: Value) -> float:
    """Returns the square root of the number of copies that broadcasting makes of each entry; ranks must agree."""
    if len(value.shape) != len(op.output_shape):
        raise Unbounded(
            f"it broadcasts one example of shape {value.shape} to {op.output_shape}, across the batch",
            "give both operands the same number of dimensions",
        )
    return math.sqrt(op.output_numel / value.numel) if value.numel else 0.0


def _sum(op: Operation, *terms: tuple[Operand, float]) -> Bound:
    """Bounds a sum of operands, each times a factor.

    Norms add by the triangle inequality, and the norm of an operand's Jacobian is its factor times sqrt(k) if it is
    copied k times. The gradient of a trained operand sums the cotangent over the k copies of each entry, which by
    Cauchy and Schwarz is at most sqrt(k) times its norm.
    """
    norm, slots, uses = 0.0, [], []
    for operand, factor in terms:
        if isinstance(operand, Value):
            copies = factor * _copies(op, operand)
            norm += copies * operand.norm
            slots.append(copies)
        elif isinstance(operand, nn.Parameter):
            copies_of_parameter = math.sqrt(op.output_numel / operand.numel())
            norm += factor * _constant_norm(op, operand)
            if operand.requires_grad:
                uses.append(ParameterUse((operand,), factor * copies_of_parameter))
        elif isinstance(operand, Constant):
            norm += factor * _constant_norm(op, operand.tensor)
        else:
            norm += factor * abs(public_number(operand)) * math.sqrt(op.output_numel)
    return Bound(norm, tuple(slots), tuple(uses))


@rule(
    operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__radd__",
    operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_", "subtract", "__sub__",
)  # fmt: skip
def add(op: Operation, input: Operand, other: Operand, *, alpha: float = 1.0) -> Bound:
    """Bounds input + alpha * other and input - alpha * other."""
    return _sum(op, (input, 1.0), (other, abs(public_number(alpha))))


@rule(torch.rsub, "__rsub__")
def subtract_from(op: Operation, input: Operand, other: Operand, *, alpha: float = 1.0) -> Bound:
    """Bounds other - alpha * input, where the factor belongs to the first operand."""
    return _sum(op, (input, abs(public_number(alpha))), (other, 1.0))


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


@rule(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply", "__mul__", "__rmul__")
def multiply(op: Operation, input: Operand, other: Operand) -> Bound:
    """Bounds a product with a constant or a parameter by the largest factor of an entry."""
    if isinstance(input, Value) and isinstance(other, Value):
        raise Unbounded("a product of two activations is not Lipschitz", "gate with a bounded, fixed mask instead")
    x, factor = (input, other) if isinstance(input, Value) else (other, input)
    assert isinstance(x, Value)
    copies = _copies(op, x)
    if isinstance(factor, nn.Parameter) and factor.requires_grad:
        # the gradient sums d * x over the outputs that share a factor, which read each entry of x only once
        size = float(real(factor).abs().max()) if factor.numel() else 0.0
        return Bound(size * copies * x.norm, size * copies, (ParameterUse((factor,), x.norm),))
    if isinstance(factor, nn.Parameter):
        factor = Constant(factor)
    if isinstance(factor, Constant):
        size = float(real(factor.tensor).abs().max()) if factor.tensor.numel() else 0.0
    else:
        size = abs(public_number(factor))
    return Bound(size * copies * x.norm, size * copies)


@rule(
    operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide,
    "div", "div_", "divide", "true_divide", "__truediv__",
)  # fmt: skip
def divide(op: Operation, input: Operand, other: Operand) -> Bound:
    """Bounds a quotient by the smallest divisor of an entry."""
    if not isinstance(input, Value) or isinstance(other, Value | nn.Parameter):
        raise Unbounded("division by an activation or a parameter is not Lipschitz", "divide by a public constant")
    smallest = float(real(other.tensor).abs().min()) if isinstance(other, Constant) else abs(public_number(other))
    if smallest == 0:
        raise Unbounded("it divides by zero", "divide by a public constant that is not zero")
    size = _copies(op, input) / smallest
    return Bound(size * input.norm, size)


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
    constants = [real(v.tensor if isinstance(v, Constant) else v).cpu() for v in operands if not isinstance(v, Value)]
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


@rule(
    operator.neg, operator.pos, torch.neg, torch.negative, torch.clone,
    "neg", "neg_", "negative", "contiguous", "clone", "float", "double", "to",
)  # fmt: skip
def copy(op: Operation, x: Value, *args: Any, **kwargs: Any) -> Bound:
    """Bounds an operation whose output has the entries of x, up to their signs."""
    full_precision(*args, *kwargs.values())
    return Bound(x.norm, 1.0)


@rule("detach", torch.detach)
def detach(op: Operation, x: Value) -> Bound:
    """Bounds detach, which passes no gradient on."""
    return Bound(x.norm, 0.0)


@rule(torch.cat, torch.concat, torch.concatenate, torch.stack)
def cat(op: Operation, tensors: Sequence[Value], dim: int = 0) -> Bound:
    """Bounds cat and stack: inputs fill disjoint parts of the output, so norms and slots combine by root of squares."""
    values = list(tensors)
    if not all(isinstance(v, Value) for v in values):
        raise Unbounded("cat of activations with constants has no rule", "add constants, or pad with zeros")
    op.inner_dims(dim, len(op.output_shape))
    return Bound(math.hypot(*(v.norm for v in values)), (1.0,) * len(values), quadrature=True)


@rule("unbind", torch.unbind)
def unbind(op: Operation, x: Value, dim: int = 0) -> Bound:
    return split(op, x, None, dim)


@rule(torch.chunk, torch.split, "chunk", "split", "tensor_split", torch.tensor_split)
def split(op: Operation, x: Value, how: Any = None, dim: int = 0, **named: Any) -> Bound:
    """Bounds the disjoint parts of x, each of which is at most x; their cotangents combine by root of squares."""
    if how is not None and not all(isinstance(size, int) for size in (how if isinstance(how, Sequence) else (how,))):
        raise Unbounded(
            f"it splits at {how!r}, which are not public integers", "give the sizes or positions as integers"
        )
    op.inner_dims(dim, len(x.shape))
    if sum(math.prod(shape) for shape in op.output_shapes) != x.numel:
        raise Unbounded("its parts overlap", "split at increasing, positive positions")
    return Bound(x.norm, 1.0, parts=(x.norm,) * len(op.output_shapes))


@rule("view", "reshape", torch.reshape, takes_batch_size=True)
def reshape(op: Operation, x: Value, *sizes: Any, **kwargs: Any) -> Bound:
    """Bounds view and reshape, which keep the entries of x."""
    _batch_first(*sizes, *kwargs.values())
    return regroup(op, x, *sizes, **kwargs)


@rule(nn.Unflatten, "unflatten", "unsqueeze", torch.unsqueeze)
def regroup(op: Operation, x: Value, *sizes: Any, **kwargs: Any) -> Bound:
    """Bounds a change of shape; shapes at two batch sizes show that each example keeps its own entries."""
    if any(isinstance(size, torch.dtype) for size in (*sizes, *kwargs.values())):
        raise Unbounded("it reads the same bits as another dtype", "keep the dtype")
    if op.output_numel != x.numel:
        raise Unbounded(
            f"it turns one example of shape {x.shape} into {op.output_shape}, moving numbers across examples",
            "keep the batch as the first dimension: x.flatten(1), x.view(x.size(0), -1)",
        )
    return Bound(x.norm, 1.0)


def _batch_first(*sizes: Any) -> None:
    """Refuses the batch size, or a multiple of it, as any dimension but the first."""
    listed = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    if any(counts_examples(size) and (place or size != BatchNumber(1)) for place, size in enumerate(listed)):
        raise Unbounded(
            "it computes with the batch size, which is private, in another place than the first dimension",
            "keep the batch as the first dimension: x.flatten(1), x.view(x.size(0), -1)",
        )


@rule("expand", takes_batch_size=True)
def expand(op: Operation, x: Value, *sizes: Any) -> Bound:
    """Bounds expand, which copies every entry equally often, along dimensions of size 1."""
    _batch_first(*sizes)
    return repeat(op, x, *sizes)


@rule("repeat")
def repeat(op: Operation, x: Value, *sizes: Any) -> Bound:
    """Bounds k copies of every entry: norms grow by sqrt(k), and the gradient sums k cotangents."""
    copies = _copies(op, x)
    return Bound(copies * x.norm, copies)


@rule(torch.flatten, "flatten")
@module_rule_of(nn.Flatten, options=("start_dim", "end_dim"))
def flatten(op: Operation, x: Value, start_dim: int = 0, end_dim: int = -1) -> Bound:
    op.inner_dims(start_dim, len(x.shape))
    return Bound(x.norm, 1.0)


@rule("permute", torch.permute)
def permute(op: Operation, x: Value, *order: Any, dims: Any = ()) -> Bound:
    order = tuple(dims or order)
    order = tuple(order[0]) if len(order) == 1 and isinstance(order[0], Sequence) else order
    if not order or order[0] % (len(x.shape) + 1) != 0:
        raise Unbounded(f"permute{tuple(order)} moves the batch dimension", "keep 0 first")
    return Bound(x.norm, 1.0)


@rule(
    "transpose", torch.transpose, "swapaxes", torch.swapaxes, "movedim", torch.movedim, "moveaxis", torch.moveaxis,
    "flip", torch.flip,
)  # fmt: skip
def move(op: Operation, x: Value, *dims: Any, **named: Any) -> Bound:
    """Bounds an exchange, a move or a reversal of dimensions."""
    for moved in (*dims, *named.values()):
        op.inner_dims(moved, len(x.shape))
    return Bound(x.norm, 1.0)


@rule("squeeze", torch.squeeze)
def squeeze(op: Operation, x: Value, dim: Any = None) -> Bound:
    if dim is None:
        raise Unbounded("squeeze without a dim drops the batch when it holds one example", "name the dim")
    return extreme(op, x, dim)


@rule("amax", "amin", torch.amax, torch.amin)
def extreme(op: Operation, x: Value, dim: Any = (), keepdim: bool = False) -> Bound:
    """Bounds amax and amin, which select entries; torch divides the gradient evenly among ties, which shortens it."""
    op.inner_dims(dim, len(x.shape))
    return Bound(x.norm, 1.0)


@rule("mean", torch.mean)
def mean(op: Operation, x: Value, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Bound:
    """Bounds the mean of n entries, which by Cauchy and Schwarz is at most their norm over sqrt(n)."""
    root = _root_of_number(op, x, kwargs.pop("axis", dim), kwargs)
    return Bound(x.norm / root, 1 / root)


@rule("sum", torch.sum)
def total(op: Operation, x: Value, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Bound:
    """Bounds the sum of n entries, which by Cauchy and Schwarz is at most sqrt(n) times their norm."""
    root = _root_of_number(op, x, kwargs.pop("axis", dim), kwargs)
    return Bound(x.norm * root, root)


def _root_of_number(op: Operation, x: Value, dims: Any, options: dict[str, Any]) -> float:
    """Returns the square root of the number of entries that are reduced to one."""
    full_precision(*options.values())
    return math.sqrt(math.prod(x.shape[d] for d in op.inner_dims(dims, len(x.shape))))


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


@rule(torch.roll, "roll")
def roll(op: Operation, x: Value, shifts: Any, dims: Any = None) -> Bound:
    """Bounds a roll along named dimensions; without a dimension, torch rolls the whole batch as one list of numbers."""
    op.inner_dims(dims, len(x.shape))
    if not all(isinstance(shift, int) for shift in (shifts if isinstance(shifts, Sequence) else (shifts,))):
        raise Unbounded(f"it rolls by {shifts!r}, which is not a public integer", "roll by a constant")
    return Bound(x.norm, 1.0)


@rule(operator.getitem)
def getitem(op: Operation, x: Value, index: Any) -> Bound:
    """Bounds a slice that keeps the whole batch and so selects a part of each example.

    Public lists or tensors of integers may read an entry k times, which multiplies norms by at most sqrt(k).
    """
    parts = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    if not parts or parts[0] not in (whole, Ellipsis) or not all(_selects(p) or _lists(p) for p in parts):
        raise Unbounded(
            f"indexing with {index!r} selects examples, or by what is no public integer",
            "start the index with ':' and use slices, or public lists of integers",
        )
    if parts[0] is Ellipsis and len([p for p in parts if p is not None]) - 1 > len(x.shape):
        raise Unbounded(f"indexing with {index!r} reaches the batch dimension", "start the index with ':'")
    if all(map(_selects, parts)):
        return Bound(x.norm, 1.0)
    return _read(op, x, lambda places: places[tuple(p.tensor.cpu() if isinstance(p, Constant) else p for p in parts)])


def _selects(part: Any) -> bool:
    """Returns whether a part of an index is a public integer, slice, None or Ellipsis."""
    if isinstance(part, slice):
        return all(p is None or isinstance(p, int) for p in (part.start, part.stop, part.step))
    return part is None or part is Ellipsis or _is_integer(part)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lists(part: Any) -> bool:
    """Returns whether a part of an index is a public list or tensor of integers."""
    if isinstance(part, Constant):
        return part.tensor.dim() > 0 and part.tensor.dtype in (torch.int32, torch.int64)
    return isinstance(part, list) and all(_is_integer(p) or _lists(p) for p in part)


def _read(op: Operation, x: Value, reads: Callable[[torch.Tensor], torch.Tensor]) -> Bound:
    """Bounds an operation that reads entries of x, by the largest number of times that it reads one of them.

    Torch adds the cotangents of an entry's copies one by one in the precision of the network, and rounds each sum.
    """
    read = reads(torch.arange(x.numel).reshape(1, *x.shape))
    count = int(torch.bincount(read.flatten(), minlength=1).max())
    root = math.sqrt(count)
    return Bound(root * x.norm, root * rounded_sum(op, count))


def rounded_sum(op: Operation, count: int) -> float:
    """Returns the factor by which the cotangent of a value that is read ``count`` times grows beyond the margin.

    Each of the count - 1 additions is rounded, and so are the cotangents before them and the sum: at most count + 1
    roundings, of which the margin of the operation covers some.
    """
    return (1 + op.norms.rounding) ** max(0, count + 1 - op.norms.covered)


@rule("select", torch.select)
def select(op: Operation, x: Value, dim: int, index: int) -> Bound:
    return narrow(op, x, dim, index)


@rule("narrow", torch.narrow)
def narrow(op: Operation, x: Value, dim: int, start: int, length: int = 1) -> Bound:
    """Bounds a view of a part of each example."""
    op.inner_dims(dim, len(x.shape))
    if not (_is_integer(start) and _is_integer(length)):
        raise Unbounded(f"its position {start!r} or {length!r} is not a public integer", "select by constants")
    return Bound(x.norm, 1.0)


@rule("index_select", torch.index_select)
def index_select(op: Operation, x: Value, dim: int, index: Constant) -> Bound:
    """Bounds a selection by a public list, which may read an entry several times."""
    op.inner_dims(dim, len(x.shape))
    if not isinstance(index, Constant):
        raise Unbounded("it selects by what is no public tensor of integers", "select by a constant or a buffer")
    return _read(op, x, lambda places: places.index_select(dim, index.tensor.cpu()))


@rule(nn.PixelUnshuffle, nn.PixelShuffle, nn.ChannelShuffle, F.pixel_shuffle, F.pixel_unshuffle)
def shuffle(op: Operation, x: Value, factor: int = 0) -> Bound:
    return Bound(x.norm, 1.0)
