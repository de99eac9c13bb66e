"""Rounding, and the range of floating-point numbers: the margins of a certificate, and what no margin covers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, SupportsBytes

import torch
from torch import Tensor, fx, nn

from ..norms.operators import NormSource, Operator
from .graph import Problem, made_from_input, node_path

# The rounding of one operation, relative to its bound, by the dtype that it is computed in. Under bfloat16 autocast the
# operand and the result are rounded; RoundedNorms covers the rounding of the weights.
OPERATION_MARGIN = {torch.float64: 0.0, torch.float32: 2.0**-21, torch.bfloat16: (1 + 2.0**-8) ** 2 - 1}

# If all bounds are below this, no value, square or partial sum of a float32 pass over a bounded input can overflow.
LARGEST_BOUND = 1e15

# For positive bounds below this, rounding to multiples of float32's smallest number may exceed the margins.
SMALLEST_BOUND = 1e-30

ROUNDING = 2.0**-8
"""The largest relative error of rounding one number to bfloat16."""


class RoundedNorms(NormSource):
    """Bounds norms of the weights rounded to bfloat16, by the norms that another source gives for the weights.

    Rounding changes every entry by at most 2^-8 of it, hence the weight by D with ||D||_F <= 2^-8 ||W||_F,
    and its operator's norm by at most ``deviation_factor(weight)`` times that. The change is not relative to the norm:
    if the norm is small because entries cancel, rounding may undo the cancellation.
    """

    rounding, covered = ROUNDING, 2  # those of the operand and of the result

    def __init__(self, source: NormSource) -> None:
        self._source = source

    def begin(self, state: SupportsBytes = b"") -> None:
        self._source.begin(state)

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        norm = self._source.operator_norm(name, weight, operator)
        return norm + operator.deviation_factor(weight) * ROUNDING * self._source.frobenius_norm(name, weight)

    def vector_norm(self, vector: Tensor) -> float:
        return self._source.vector_norm(vector) * (1 + ROUNDING)


def dtype_problems(model: nn.Module, compute_dtype: torch.dtype) -> list[Problem]:
    """Finds parameters, and a precision of the pass, for whose rounding there is no margin."""
    problems = []
    if compute_dtype not in OPERATION_MARGIN:
        hint = "float32, float64 or bfloat16; float16 needs a loss scaler, which changes every bound"
        problems.append(Problem("compute_dtype", f"{compute_dtype} is not a supported floating dtype", hint))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in OPERATION_MARGIN:
            hint = "convert the parameter with .float()"
            problems.append(Problem(name, f"its dtype {parameter.dtype} is not float32, float64 or bfloat16", hint))
        elif parameter.requires_grad and parameter.dtype == torch.bfloat16:
            reason = "it is trained in bfloat16, which would round the gradient's sum over the batch"
            problems.append(Problem(name, reason, "keep it in float32 and compute under bfloat16 autocast"))
    return problems


def range_problems(node: fx.Node, norm: float, cotangent: float) -> list[Problem]:
    """Finds values, or cotangents on the way to a parameter, that float32 may round to infinity or to zero."""
    problems = []
    if 0 < norm < SMALLEST_BOUND:
        reason = f"its values are at most {norm:.3g}, where float32 rounds them up by more than the margin"
        problems.append(Problem(node_path(node), reason, "drop extreme constants"))
    size = max(norm, cotangent)
    if not size < LARGEST_BOUND:
        reason = f"its values or cotangents may reach {size:.3g}, where float32 overflows"
        hint = "bound the layers' norms by a projection, put BoundedInput first, or drop extreme constants"
        problems.append(Problem(node_path(node), reason, hint))
    return problems


# autograd's nodes that join a parameter and rows entry by entry; torch then sums the gradient over the batch by halves
_BY_ENTRY = frozenset({"Mul", "Add", "Sub", "Rsub", "Div", "Addcmul", "Addcdiv", "Lerp", "Maximum", "Minimum", "Where",
                       "Pow", "PreluKernel", "Cat", "Stack"})  # fmt: skip
# and those in which a row without a gradient chooses entries of a parameter
_BY_NUMBER = frozenset({"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"})


class SumsOfTorch(fx.Interpreter):
    """Runs a graph, and finds nodes whose gradients of a trained parameter torch sums over the batch as it likes.

    Each node is tried by itself, and what autograd has recorded shows where a parameter meets the rows. A function of
    this library sums in pieces.
    """

    def __init__(self, graph: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
        super().__init__(graph)
        self._nodes, self._rows = nodes, made_from_input(graph)
        self.found: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n in self._nodes:
            tried: Any = getattr(self, n.op)(n.target, *fx.node.map_arg((n.args, n.kwargs), self._apart))
            for tensor in tried if isinstance(tried, tuple | list) else (tried,):
                self._follow(n, tensor.grad_fn, {})
        return super().run_node(n)

    def _apart(self, node: fx.Node) -> Any:
        value = self.env[node]
        rows = node in self._rows and isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_().clone() if rows else value

    def _follow(self, node: fx.Node, function: Any, seen: dict[Any, frozenset[bool]]) -> frozenset[bool]:
        """Returns whether a function of autograd reads parameters (True) and rows (False), or what does both."""
        if function not in seen and hasattr(function, "variable"):
            seen[function] = frozenset({isinstance(function.variable, nn.Parameter)})
        elif function not in seen:
            read = [self._follow(node, one, seen) for one, _ in function.next_functions if one is not None]
            seen[function] = frozenset().union(*read)
            name, own = function.name().partition("Backward")[0], getattr(function, "_forward_cls", None)
            harmless = name in _BY_ENTRY or (own is not None and own.__module__.startswith("lipdp_lightning."))
            if frozenset({True}) in read and (name in _BY_NUMBER or (False in seen[function] and not harmless)):
                self.found[node] = name
        return seen[function]
