"""Walks a model's graph with bounds in place of values (paper 001, Algorithm 1, on graphs instead of chains)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import rules  # registers the rules of torch's own operations
from .certificate import Certificate, GroupBound, NodeBound, UseBound
from .cotangents import CotangentWalk
from .losses import Loss, as_loss
from .registry import Rule, function_rule, module_rule
from .trace import (
    MIXED,
    CertificationError,
    Number,
    Problem,
    altered,
    argument_nodes,
    constant_of,
    depends_on_example,
    node_path,
    operation_name,
    propagate_shapes,
    trace,
    unsupported,
)
from .values import Bound, NormSource, Operation, ParameterUse, Unbounded, Value

__all__ = ["CertificationError", "Certifier", "certify"]

# Rounding of one operation in the dtype it is computed in, relative to its bound
OPERATION_MARGIN = {torch.float64: 0.0, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8}

# Below this, no value, square or partial sum of a float32 pass over a bounded input can overflow
LARGEST_BOUND = 1e15


@dataclass(frozen=True)
class _Step:
    """A node prepared once; ``rule`` is None for the input and for a member of a tuple."""

    node: fx.Node
    rule: Rule | None
    module: nn.Module | None
    reads: tuple[fx.Node, ...]
    shapes: tuple[tuple[int, ...], ...]


class Certifier:
    """Prepares a model once; ``certify()`` then costs one walk over plain numbers and the norms of the weights.

    Guarantee: for every input whose per-example norm is at most ``input_bound`` and every label, the
    certificate's numbers are upper bounds for the weights as they are at the call.
    """

    def __init__(
        self,
        model: nn.Module,
        input_shape: tuple[int, ...],
        input_bound: float,
        loss: Loss | nn.Module | str,
        *,
        norms: NormSource | None = None,
        compute_dtype: torch.dtype = torch.float32,
        cotangent_caps: Mapping[str, float] | None = None,
    ) -> None:
        self.loss = _check_arguments(model, input_bound, loss, compute_dtype)
        self.input_bound = float(input_bound)
        self.norms = norms or NormSource()
        self._compute_dtype = compute_dtype
        self._margin = 1.0 + OPERATION_MARGIN[compute_dtype]
        self._graph = trace(model)
        problems = altered(model) + unsupported(self._graph)
        if problems:
            raise CertificationError(problems)
        propagate_shapes(self._graph, tuple(input_shape))
        self._steps = _prepare(self._graph)
        self._output = _output_node(self._graph)
        try:
            self.loss.lipschitz(self._output.meta["shape"])
        except ValueError as error:
            raise CertificationError([_loss_problem(error)]) from error
        self._caps = _caps(self._steps, cotangent_caps or {}, self._margin)
        slots = {step.node: step.reads for step in self._steps}
        self._walk = CotangentWalk([s.node for s in self._steps], slots, self._output)
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}

    def certify(self) -> Certificate:
        """Bounds for the weights as they are now."""
        bounds: dict[fx.Node, Bound] = {}
        problems: list[Problem] = []
        self.norms.begin()
        for step in self._steps:
            try:
                bounds[step.node] = self._forward(step, bounds)
            except Unbounded as found:
                name = operation_name(step.node)
                problems.append(Problem(node_path(step.node), f"{name}: {found.reason}", found.hint))
                bounds[step.node] = Bound(0.0, (0.0,) * len(step.reads), parts=(0.0,) * len(step.shapes))
        if problems:
            raise CertificationError(problems)
        at_output = self.loss.lipschitz(self._output.meta["shape"]) * self._margin
        cotangent = self._walk.run(bounds, at_output, self._caps)
        return self._assemble(bounds, cotangent, at_output)

    def _forward(self, step: _Step, bounds: dict[fx.Node, Bound]) -> Bound:
        node = step.node
        if node.op == "placeholder":
            return Bound(self.input_bound, ())
        if step.rule is None:
            index = node.args[1]
            assert isinstance(index, int)
            return Bound(bounds[step.reads[0]].parts[index], 1.0)
        operation = Operation(operation_name(node), step.module, step.shapes[0], self.norms, step.shapes)
        args = fx.node.map_arg(node.args, lambda n: self._argument(n, bounds))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self._argument(n, bounds))
        try:
            bound = step.rule(operation, *args, **kwargs)
        except (TypeError, AttributeError, IndexError) as error:
            raise Unbounded(
                f"its rule does not take this call ({error})",
                "call the operation in a plainer way, or register a rule",
            ) from error
        if len(bound.slots) != len(step.reads):
            raise Unbounded(
                f"its rule answers for {len(bound.slots)} argument slots, and {len(step.reads)} hold activations",
                "return one Lipschitz constant for each activation that the operation reads",
            )
        _check_parameters(step.module, (args, kwargs), bound)
        if self._compute_dtype == torch.bfloat16:
            _check_accumulation(step, bound)
        return self._with_margin(bound)

    def _with_margin(self, bound: Bound) -> Bound:
        margin = self._margin
        return Bound(
            bound.norm * margin,
            tuple(s * margin for s in bound.slots),
            tuple(ParameterUse(u.parameters, u.gradient_factor * margin) for u in bound.uses),
            bound.quadrature,
            bound.cotangent_cap * margin,
            tuple(p * margin for p in bound.parts),
        )

    def _argument(self, node: fx.Node, bounds: dict[fx.Node, Bound]) -> Any:
        if depends_on_example(node):
            return Value(bounds[node].norm, node.meta["shape"])
        if node.op == "get_attr":
            return constant_of(self._model, str(node.target))
        if isinstance(node.meta["shape"], Number):
            return node.meta["shape"].value
        raise Unbounded(
            "it reads a tensor that forward computes from constants or weights alone",
            "register constants as buffers, and let layers read their weights directly",
        )

    def _assemble(
        self, bounds: dict[fx.Node, Bound], cotangent: dict[fx.Node, float], at_output: float
    ) -> Certificate:
        nodes, uses = [], []
        for step in self._steps:
            node, bound = step.node, bounds[step.node]
            shape = step.shapes[0]
            nodes.append(
                NodeBound(node.name, operation_name(node), bound.norm, bound.slots, cotangent[node], shape)
            )
            for use in bound.uses:
                record = UseBound(
                    node=node.name,
                    module=str(node.target) if step.module is not None else "",
                    cotangent_bound=cotangent[node],
                    gradient_factor=use.gradient_factor,
                    input_bound=bounds[step.reads[0]].norm if step.reads else 0.0,
                    lipschitz=bound.slots[0] if bound.slots else 0.0,
                    scalable=bool(getattr(step.module, "scales_gradient", False)),
                )
                uses.append((use.parameters, record))
        groups = _groups(uses, self._names)
        problems = _unbounded(groups, self._model)
        if problems:
            raise CertificationError(problems)
        return Certificate(tuple(nodes), groups, at_output, self.input_bound, self._output.name)


def certify(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_bound: float,
    loss: Loss | nn.Module | str,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Certificate:
    """The certificate of a model as it is now; ``input_shape`` is that of one example.

    Raises CertificationError, naming every module and operation that cannot be bounded, each with the
    reason and the fix.
    """
    return Certifier(model, input_shape, input_bound, loss, compute_dtype=compute_dtype).certify()


def _check_arguments(model: nn.Module, input_bound: float, loss: Any, compute_dtype: torch.dtype) -> Loss:
    problems = []
    if not (isinstance(input_bound, int | float) and math.isfinite(input_bound) and input_bound > 0):
        hint = "the radius of the ball that BoundedInput keeps every example in, such as 1.0"
        problems.append(Problem("input_bound", f"{input_bound!r} is not a positive, finite number", hint))
    if compute_dtype not in OPERATION_MARGIN:
        hint = "float32, float64 or bfloat16; float16 needs a loss scaler, which changes every bound"
        problems.append(Problem("compute_dtype", f"{compute_dtype} is not a supported floating dtype", hint))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in OPERATION_MARGIN:
            hint = "convert the parameter with .float()"
            problems.append(
                Problem(name, f"its dtype {parameter.dtype} is not float32, float64 or bfloat16", hint)
            )
        elif parameter.requires_grad and parameter.dtype == torch.bfloat16:
            reason = "it is trained in bfloat16, which would round the gradient's sum over the batch"
            problems.append(Problem(name, reason, "keep it in float32 and compute under bfloat16 autocast"))
    certified: Loss | None = None
    try:
        certified = as_loss(loss)
    except ValueError as error:
        problems.append(_loss_problem(error))
    if problems or certified is None:
        raise CertificationError(problems + _structural_problems(model))
    return certified


def _loss_problem(error: ValueError) -> Problem:
    reason, _, hint = str(error).partition(" HINT: ")
    return Problem("loss", reason.rstrip("."), hint.rstrip("."))


def _check_parameters(module: nn.Module | None, arguments: Any, bound: Bound) -> None:
    """Every trained parameter that the operation holds or reads needs a bound on this use of it.

    A bound on another use of the same parameter does not serve: the gradients of the uses add.
    """
    read: list[nn.Parameter] = list(module.parameters()) if module is not None else []
    fx.node.map_aggregate(
        arguments, lambda a: read.append(a) if isinstance(a, nn.Parameter) else None
    )
    covered = {id(p) for use in bound.uses for p in use.parameters}
    if any(p.requires_grad and id(p) not in covered for p in read):
        raise Unbounded(
            "its rule bounds no gradient for a trained parameter that it uses",
            "return a ParameterUse for it, or freeze it with requires_grad_(False)",
        )


_KEEPS_FLOAT32 = (rules.structure.add, rules.structure.subtract, rules.structure.multiply)


def _check_accumulation(step: _Step, bound: Bound) -> None:
    """Under bfloat16 autocast a parameter's gradient must still be summed over the batch in float32.

    The scaled layers do so, and arithmetic with a float32 parameter that is not a scalar, which torch carries
    out in float32.
    """
    if getattr(step.module, "scales_gradient", False):
        return
    if step.rule in _KEEPS_FLOAT32 and all(p.dim() > 0 for use in bound.uses for p in use.parameters):
        return
    if bound.uses:
        raise Unbounded(
            "under bfloat16 its gradient would be summed over the batch in bfloat16",
            "use nn.Linear, nn.Conv1d or nn.Conv2d and make_private, or train in float32",
        )


def _structural_problems(model: nn.Module) -> list[Problem]:
    try:
        return altered(model) + unsupported(trace(model))
    except CertificationError as error:
        return list(error.problems)


def _prepare(graph: fx.GraphModule) -> list[_Step]:
    modules = dict(graph.named_modules())
    steps, problems = [], []
    for node in graph.graph.nodes:
        if node.op == "output" or not depends_on_example(node):
            continue
        shape = node.meta["shape"]
        if shape == MIXED:
            hint = "keep the batch as the first dimension of every tensor, and reduce over later ones"
            problems.append(Problem(node_path(node), "its output does not keep the examples apart", hint))
            continue
        reads = tuple(n for n in argument_nodes(node) if depends_on_example(n))
        module = modules[str(node.target)] if node.op == "call_module" else None
        found = module_rule(type(module)) if module is not None else function_rule(node.target)
        member = any(isinstance(n.meta["shape"], list) for n in reads)
        rule = None if node.op == "placeholder" or member else found
        if member and not _takes_member(node):
            hint = "take its members one by one: a, b = x.chunk(2, dim=1)"
            problems.append(Problem(node_path(node), "it reads a tuple of tensors as a whole", hint))
        elif rule is None and not member and node.op != "placeholder":
            hint = "use a supported operation, or register a rule for it (see CONTRIBUTING)"
            problems.append(Problem(node_path(node), f"{operation_name(node)} has no rule", hint))
        shapes = tuple(shape) if isinstance(shape, list) else (shape,)
        assert rule is None or callable(rule)
        steps.append(_Step(node, rule, module, reads, shapes))
    if problems:
        raise CertificationError(problems)
    return steps


def _caps(steps: list[_Step], caps: Mapping[str, float], margin: float) -> dict[fx.Node, float]:
    """Clips at the outputs of modules, as nodes; a module that the graph does not call cannot be clipped."""
    called = {str(s.node.target) for s in steps if s.module is not None}
    unknown = sorted(set(caps) - called)
    if unknown:
        hint = f"name modules that the model calls: {', '.join(sorted(called))}"
        raise CertificationError([Problem(path, "a cotangent clip is asked for, and no such call exists", hint) for path in unknown])
    return {s.node: caps[str(s.node.target)] * margin for s in steps if s.module is not None and str(s.node.target) in caps}


def _takes_member(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _output_node(graph: fx.GraphModule) -> fx.Node:
    returned = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    if not isinstance(returned, fx.Node) or not isinstance(returned.meta["shape"], tuple):
        hint = "return one tensor of logits, computed from the input"
        raise CertificationError([Problem("output", "the model does not return one tensor of logits", hint)])
    return returned


def _unbounded(groups: tuple[GroupBound, ...], model: nn.Module) -> list[Problem]:
    """Trained parameters that no use bounds, and groups whose bound is not a number that noise can be scaled to."""
    problems = []
    covered = {name for group in groups for name in group.parameters}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in covered:
            hint = (
                "freeze it with requires_grad_(False), remove it, or return a ParameterUse for it from the rule of "
                "the layer that holds it"
            )
            problems.append(
                Problem(name, "this trained parameter has no bound: no certified operation uses it", hint)
            )
    for group in groups:
        if not group.worst_case < LARGEST_BOUND:
            hint = "limit the layers' norms by a projection, or put BoundedInput first"
            problems.append(Problem(group.name, f"its sensitivity bound is {group.worst_case}", hint))
    return problems


def _groups(uses: list[tuple[tuple[Tensor, ...], UseBound]], names: dict[int, str]) -> tuple[GroupBound, ...]:
    """Parameters that are used together, or share a tensor, are one group; each is named after its first parameter's layer."""
    members: list[tuple[dict[int, Tensor], list[UseBound]]] = []
    for parameters, use in uses:
        merged, together = {id(p): p for p in parameters}, [use]
        for other in [m for m in members if merged.keys() & m[0].keys()]:
            members.remove(other)
            merged = {**other[0], **merged}
            together = other[1] + together
        members.append((merged, together))
    order = {key: i for i, key in enumerate(names)}
    groups = []
    for tensors, together in members:
        keys = sorted(tensors, key=lambda k: order.get(k, len(order)))
        labels = tuple(names.get(k, "?") for k in keys)
        name = labels[0].rpartition(".")[0] or labels[0]
        groups.append(
            (order.get(keys[0], 0), name, labels, sum(tensors[k].numel() for k in keys), tuple(together))
        )
    groups.sort(key=lambda g: g[0])
    taken = [g[1] for g in groups]
    return tuple(
        GroupBound(labels[0] if taken.count(name) > 1 else name, labels, numel, together)
        for _, name, labels, numel, together in groups
    )
