"""Rounding, and the range of floating-point numbers: the margins of a certificate, and what no margin covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, SupportsBytes

import torch
from torch import Tensor, fx, nn

from ..norms.operators import NormSource, Operator
from . import rules
from .graph import Problem, made_from_input, node_path
from .identity import training_mode
from .inplace import of_library
from .registry import Bound, Step, Unbounded, in_pieces

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


# ---- sums over the batch, whose rounding the margin of a sensitivity covers only if they are formed in pieces

_UNCONVERTED = (
    "torch would sum the gradient of its weight over the batch in one product, and no margin covers the rounding",
    "use nn.Linear or a convolution of torch.nn itself, not a subclass, and make_private",
)
_SUMMED = (
    rules.linear.linear_bound, rules.linear.linear_module, rules.linear.conv_bound, rules.linear.conv_module,
    rules.transposed.transposed_bound, rules.transposed.transposed_module,
)  # fmt: skip


def _sums_over_batch(step: Step) -> bool:
    """Returns whether torch would sum the gradient of a trained weight or bias over the batch in one product."""
    return bool(step.trained) and not step.scalable and step.rule in _SUMMED


def calls_in_pieces(steps: Sequence[Step]) -> dict[fx.Node, Callable[..., Any]]:
    """Returns the functions that replace those of torch which read trained parameters."""
    found = {s.node: in_pieces(s.node.target) for s in steps if s.module is None and _sums_over_batch(s)}
    return {node: function for node, function in found.items() if function is not None}


def sums_of_torch(
    model: nn.Module, graph: fx.GraphModule, steps: Sequence[Step], calls: Collection[fx.Node],
    input_shape: tuple[int, ...], compute_dtype: torch.dtype,
) -> list[Problem]:  # fmt: skip
    """Finds uses of trained weights whose gradient torch itself would sum over the batch.

    Args:
        model: The network.
        graph: Its graph.
        steps: The nodes of the graph that depend on the example.
        calls: The nodes at which a function of this library takes the place of torch's.
        input_shape: The shape of one example.
        compute_dtype: The precision that the network runs in.
    """
    summed = [step.node for step in steps if _sums_over_batch(step) and step.node not in calls]
    problems = [Problem(node_path(node), *_UNCONVERTED) for node in summed]
    own = {s.node for s in steps if s.trained and s.rule is not None and not of_library(s.rule)}
    if not own or compute_dtype == torch.float64:
        return problems
    tried = SumsOfTorch(graph, own)  # rules of users
    with training_mode(model, False), torch.inference_mode(False), torch.enable_grad():
        like = next(model.parameters())
        tried.run(torch.zeros((2, *input_shape), dtype=like.dtype, device=like.device))
    hint = "multiply by it through nn.Linear, a convolution of torch.nn, or lipdp_lightning.layers.functions"
    return problems + [Problem(node_path(n), f"{name}: {_UNCONVERTED[0]}", hint) for n, name in tried.found.items()]


_KEEPS_FLOAT32 = (rules.structure.add, rules.structure.subtract_from, rules.structure.multiply)


def refuse_rounded_sum(step: Step, bound: Bound) -> None:
    """Refuses a use of trained parameters whose gradient would be summed over the batch in bfloat16.

    Under bfloat16 autocast, the scaled layers sum a parameter's gradient in float32, and torch computes in float32 if
    one operand is a float32 parameter that is not a scalar.
    """
    if step.scalable or not bound.uses:
        return
    if step.rule in _KEEPS_FLOAT32 and all(p.dim() > 0 for use in bound.uses for p in use.parameters):
        return
    raise Unbounded(
        "under bfloat16 its gradient would be summed over the batch in bfloat16",
        "use nn.Linear, nn.Conv1d or nn.Conv2d and make_private, or train in float32",
    )
