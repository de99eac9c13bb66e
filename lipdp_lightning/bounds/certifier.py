"""Walks a model's graph with bounds in place of values (paper 001, Algorithm 1, on graphs instead of chains)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .alterations import alterations
from .backward import CotangentWalk
from .certificate import Certificate, NodeBound, UseBound
from .checks import (
    LARGEST_BOUND,
    OPERATION_MARGIN,
    SMALLEST_BOUND,
    check_accumulation,
    check_arguments,
    check_parameters,
    loss_problem,
    unbounded,
)
from .constants import Constants
from .groups import Groups
from .held import HeldTensors
from .identity import NetworkIdentity
from .losses import Loss
from .registry import Rule, function_rule, module_rule
from .rehearsal import rehearse
from .rounded_norms import RoundedNorms
from .shapes import MIXED, argument_nodes, depends_on_example, propagate_shapes
from .trace import CertificationError, Problem, is_leaf, node_path, operation_name, trace, unsupported
from .values import Bound, NormSource, Operation, Unbounded, Value, with_margin

__all__ = ["CertificationError", "Certifier", "certify"]


@dataclass(frozen=True)
class _Step:
    """A node prepared once; ``rule`` is None for the input and for a member of a tuple.

    ``flat``: its arguments, if they are nodes and plain values and hold no node deeper inside; beside each of them the
    shape of one example, where it depends on one. ``activations_alone``: all of them do. ``path``: of its module, where
    that is not the model itself; ``scalable``: it can measure and scale its gradient by example.
    """

    node: fx.Node
    name: str
    rule: Rule | None
    module: nn.Module | None
    reads: tuple[fx.Node, ...]
    shapes: tuple[tuple[int, ...], ...]
    operation: Operation
    flat: tuple[tuple[Any, Any], ...] | None
    activations_alone: bool
    path: str
    scalable: bool


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
        self.loss = check_arguments(model, input_bound, loss, compute_dtype)
        self.input_bound = float(input_bound)
        self.norms = norms or NormSource()
        self._norms_used = RoundedNorms(self.norms) if compute_dtype == torch.bfloat16 else self.norms
        self._compute_dtype = compute_dtype
        self._margin = 1.0 + OPERATION_MARGIN[compute_dtype]
        self._model, self._input_shape = model, tuple(input_shape)
        self._cotangent_caps = dict(cotangent_caps or {})
        self._held = HeldTensors(model)
        self._take_up()

    def _take_up(self) -> None:
        """Trace the network as it is now, and keep who it is: the identity is part of every certificate."""
        model = self._model
        problems = alterations(model)
        if problems:
            raise CertificationError(problems)
        self.identity = NetworkIdentity.of(model, self.loss)
        self._graph = trace(model)
        problems = unsupported(self._graph)
        if problems:
            raise CertificationError(problems)
        propagate_shapes(self._graph, self._input_shape)
        self._held.named()
        self._steps = _prepare(self._graph, self._norms_used, model, self._held)
        self._output = _output_node(self._graph)
        self._constants = Constants(model, self._graph)
        self._rehearse()
        try:
            self.loss.lipschitz(self._output.meta["shape"])
        except ValueError as error:
            raise CertificationError([loss_problem(error)]) from error
        self._caps = _caps(self._steps, self._cotangent_caps, self._margin)
        slots = {step.node: step.reads for step in self._steps}
        self._walk = CotangentWalk([s.node for s in self._steps], slots, self._output)
        self._groups = Groups()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the model's output for one example."""
        return tuple(self._output.meta["shape"])

    def _rehearse(self) -> None:
        if is_leaf(self._model):
            return
        hint = "write a forward that computes the same at every call, from its input, parameters, buffers and constants"
        reasons = rehearse(self._model, self._graph, self._input_shape, is_leaf)
        if reasons:
            raise CertificationError([Problem(type(self._model).__name__, reason, hint) for reason in reasons])

    def follow(self) -> None:
        """Trace the network anew if it is another than the one that was traced; ``identity`` is another then, too."""
        if self.identity.differences():
            self._take_up()

    def certify(self, digest: bytes = b"") -> Certificate:
        """Returns bounds for the network and its weights as they are now.

        Args:
            digest: names all bits of the weights, where the caller knows it; bounds that were sealed under it are used.
        """
        self.follow()
        self._constants.begin()
        bounds: dict[fx.Node, Bound] = {}
        problems: list[Problem] = []
        self._held.named()  # parameters may have been replaced
        self.norms.begin(digest)
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
        if step.rule is None:
            if step.node.op == "placeholder":
                return Bound(self.input_bound, ())
            index = step.node.args[1]
            assert isinstance(index, int)
            return Bound(bounds[step.reads[0]].parts[index], 1.0)
        args, kwargs = self._arguments(step, bounds)
        try:
            bound = step.rule(step.operation, *args, **kwargs)
        except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            what = (str(error) or type(error).__name__).splitlines()[0].partition(" HINT:")[0]
            raise Unbounded(
                f"its rule does not take this call ({what})",
                "call the operation in a plainer way, or register a rule",
            ) from error
        if len(bound.slots) != len(step.reads):
            raise Unbounded(
                f"its rule answers for {len(bound.slots)} argument slots, and {len(step.reads)} hold activations",
                "return one Lipschitz constant for each activation that the operation reads",
            )
        check_parameters(step.module, () if step.activations_alone else (args, kwargs.values()), bound)
        if self._compute_dtype == torch.bfloat16:
            check_accumulation(step.rule, step.module, bound)
        return with_margin(bound, self._margin)

    def _arguments(self, step: _Step, bounds: dict[fx.Node, Bound]) -> tuple[Any, Any]:
        node = step.node
        if step.flat is not None:
            values = [
                Value(bounds[argument].norm, shape) if shape is not None
                else self._argument(argument, bounds) if isinstance(argument, fx.Node) else argument
                for argument, shape in step.flat
            ]  # fmt: skip
            return values, node.kwargs
        args = fx.node.map_arg(node.args, lambda n: self._argument(n, bounds))
        return args, fx.node.map_arg(node.kwargs, lambda n: self._argument(n, bounds))

    def _argument(self, node: fx.Node, bounds: dict[fx.Node, Bound]) -> Any:
        if depends_on_example(node):
            return Value(bounds[node].norm, node.meta["shape"])
        return self._constants.argument(node)

    def _assemble(self, bounds: dict[fx.Node, Bound], cotangent: dict[fx.Node, float], at_output: float) -> Certificate:
        problems = self._overflows(bounds, cotangent)
        if problems:
            raise CertificationError(problems)
        nodes, uses = [], []
        for step in self._steps:
            node, bound = step.node, bounds[step.node]
            received, slots = cotangent[node], bound.slots
            nodes.append(NodeBound(node.name, step.name, bound.norm, slots, received, step.shapes[0]))
            for use in bound.uses:
                reads = bounds[step.reads[0]].norm if step.reads else 0.0
                lipschitz, factor = slots[0] if slots else 0.0, use.gradient_factor
                of_use = UseBound(node.name, step.path, received, factor, reads, lipschitz, step.scalable)
                uses.append((use.parameters, of_use))
        named = self._held.named_parameters()
        groups = self._groups.of(uses, named)
        problems = unbounded(groups, named)
        if problems:
            raise CertificationError(problems)
        return Certificate(tuple(nodes), groups, at_output, self.input_bound, self._output.name)

    def _overflows(self, bounds: dict[fx.Node, Bound], cotangent: dict[fx.Node, float]) -> list[Problem]:
        """Nodes whose values, or whose cotangents on the way to a parameter, might leave float32's range."""
        problems: list[Problem] = []
        small = [step.node for step in self._steps if 0 < bounds[step.node].norm < SMALLEST_BOUND]
        for node in small:
            reason = (
                f"its values are at most {bounds[node].norm:.3g}, where float32 rounds them up by more than the margin"
            )
            problems.append(Problem(node_path(node), reason, "drop extreme constants"))
        if not small and all(
            [b.norm < LARGEST_BOUND for b in bounds.values()] + [c < LARGEST_BOUND for c in cotangent.values()]
        ):
            return problems
        trained: set[fx.Node] = set()
        for step in self._steps:
            node, bound = step.node, bounds[step.node]
            if bound.uses or any(read in trained for read in step.reads):
                trained.add(node)  # before the first parameter no cotangent is formed
            size = max(bound.norm, cotangent[node] if node in trained else 0.0)
            if not size < LARGEST_BOUND:
                reason = f"its values or cotangents may reach {size:.3g}, where float32 overflows"
                hint = "bound the layers' norms by a projection, put BoundedInput first, or drop extreme constants"
                problems.append(Problem(node_path(node), reason, hint))
        return problems


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


def _prepare(graph: fx.GraphModule, norms: NormSource, model: nn.Module, held: HeldTensors) -> list[_Step]:
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
        operation = Operation(operation_name(node), module, shapes[0], norms, shapes, held.name_of)
        flat, path = _flat(node), "" if module is None or module is model else str(node.target)
        activations_alone = flat is not None and all(of is not None for _, of in flat) and not node.kwargs
        scalable = bool(getattr(module, "scales_gradient", False))
        steps.append(
            _Step(node, operation.name, rule, module, reads, shapes, operation, flat, activations_alone, path, scalable)
        )
    if problems:
        raise CertificationError(problems)
    return steps


def _caps(steps: list[_Step], caps: Mapping[str, float], margin: float) -> dict[fx.Node, float]:
    """Clips at the outputs of modules, as nodes; a module that the graph does not call cannot be clipped."""
    called = {str(s.node.target) for s in steps if s.module is not None}
    unknown = sorted(set(caps) - called)
    if unknown:
        hint = f"name modules that the model calls: {', '.join(sorted(called))}"
        raise CertificationError(
            [Problem(path, "a cotangent clip is asked for, and no such call exists", hint) for path in unknown]
        )
    return {
        s.node: caps[str(s.node.target)] * margin for s in steps if s.module is not None and str(s.node.target) in caps
    }


def _flat(node: fx.Node) -> tuple[tuple[Any, Any], ...] | None:
    """The arguments and shapes of a node, if none of them is a container, and no named one a node."""
    containers = (tuple, list, dict, slice)
    named = node.kwargs.values()
    if any(isinstance(a, containers) for a in (*node.args, *named)) or any(isinstance(a, fx.Node) for a in named):
        return None
    return tuple((a, a.meta["shape"] if isinstance(a, fx.Node) and depends_on_example(a) else None) for a in node.args)


def _takes_member(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _output_node(graph: fx.GraphModule) -> fx.Node:
    returned = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    if not isinstance(returned, fx.Node) or not isinstance(returned.meta["shape"], tuple):
        hint = "return one tensor of logits, computed from the input"
        raise CertificationError([Problem("output", "the model does not return one tensor of logits", hint)])
    return returned
