"""Certification: a walk over a model's graph with bounds in place of values (paper 001, Algorithm 1, for graphs)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsBytes

import torch
from torch import Tensor, fx, nn

from ..norms.operators import NormSource
from .backward import CotangentWalk
from .certificate import Certificate, GroupBound, NodeBound, UseBound, grouped
from .graph import (
    CertificationError,
    Problem,
    alterations,
    compiled_alike,
    is_leaf,
    node_path,
    operation_name,
    structural_problems,
    unsupported,
    with_calls,
)
from .identity import NetworkIdentity
from .losses import Loss, as_loss
from .registry import Bound, Operation, ParameterUse, Step, Unbounded, Value, function_rule, module_rule
from .rehearsal import rehearse
from .rounding import (
    LARGEST_BOUND,
    OPERATION_MARGIN,
    RoundedNorms,
    calls_in_pieces,
    dtype_problems,
    range_problems,
    refuse_rounded_sum,
    sums_of_torch,
)
from .shapes import MIXED, Constants, argument_nodes, depends_on_example, output_node, propagate_shapes, trace_at

__all__ = ["CertificationError", "Certifier", "certify"]


class Certifier:
    """Certifies a model. It is prepared once; :meth:`certify` then costs a walk over numbers and norms of the weights.

    Guarantee: for every input whose norm per example is at most ``input_bound`` and every label, the numbers of a
    certificate are upper bounds for the weights as they are at the call.

    Args:
        model: The network.
        input_shape: The shape of one example, without the batch.
        input_bound: The largest norm of one example's input.
        loss: A certified loss, its name, or a loss of torch whose reduction is a sum or none.
        norms: The source of the weights' norms; by default each is computed anew.
        compute_dtype: The precision that the network runs in.
        cotangent_caps: The radius of each cotangent clip, by the path of the module at whose output it acts.
        tf32: Whether a GPU may round the factors of sums over the batch to TF32, also where the network runs in
            float32; in bfloat16 it may anyway, since factors in bfloat16 are exact in TF32.

    Attributes:
        tensor_cores: Whether sums over the batch need the margin of tensor cores.

    Raises:
        CertificationError: If the model cannot be certified; it lists every reason and its fix.

    Example::

        certifier = Certifier(network, (12,), 1.0, "cross_entropy")
        certifier.certify().sensitivities("joint")
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
        tf32: bool = False,
    ) -> None:
        self.loss = _checked(model, input_bound, loss, compute_dtype)
        self.input_bound = float(input_bound)
        self.norms = norms or NormSource()
        self._norms_used = RoundedNorms(self.norms) if compute_dtype == torch.bfloat16 else self.norms
        self._compute_dtype = compute_dtype
        self.tensor_cores = compute_dtype == torch.bfloat16 or (tf32 and compute_dtype == torch.float32)
        self._margin = 1.0 + OPERATION_MARGIN[compute_dtype]
        self._model, self._input_shape = model, tuple(input_shape)
        self._cotangent_caps = dict(cotangent_caps or {})
        self._take_up()

    def _take_up(self) -> None:
        """Traces the network as it is now, and takes its identity, which every certificate relies on."""
        model = self._model
        _refuse(alterations(model))
        self.identity = NetworkIdentity.of(model, self.loss)
        _refuse([Problem(type(model).__name__, label + _UNSTEADY, _STEADY) for label in self.identity.unsteady])
        self._graph = trace_at(model, self._input_shape)
        _refuse(unsupported(self._graph))
        propagate_shapes(self._graph, self._input_shape)
        self._parameters = dict(model.named_parameters())
        self._device = next((p.device.type for p in self._parameters.values()), "cpu")
        held = {**self._parameters, **dict(model.named_buffers())}
        self._steps = _prepare(self._graph, self._norms_used, model, {id(t): name for name, t in held.items()})
        self._output = output_node(self._graph)
        self._constants = Constants(model, self._graph)
        reasons = [] if is_leaf(model) else rehearse(model, self._graph, self._input_shape)
        self._hidden = [Problem(type(model).__name__, reason, _STEADY) for reason in reasons]
        try:
            self.loss.lipschitz(self._output.meta["shape"])
        except ValueError as error:
            raise CertificationError([_loss_problem(error)]) from error
        calls = calls_in_pieces(self._steps)
        self._in_pieces = with_calls(self._graph, calls) if calls else self._graph
        self._run = compiled_alike(model, self._in_pieces.forward)
        self._of_torch = sums_of_torch(model, self._graph, self._steps, calls, self._input_shape, self._compute_dtype)
        self._caps = _caps(self._steps, self._cotangent_caps, self._margin)
        slots = {step.node: step.reads for step in self._steps}
        self._walk = CotangentWalk([s.node for s in self._steps], slots, self._output)
        inner = [module for module in model.modules() if not is_leaf(module)]
        self._looking = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the model's output for one example."""
        return tuple(self._output.meta["shape"])

    def follow(self) -> None:
        """Traces the network anew, and takes a new ``identity``, if it differs from the network that was traced."""
        if self.identity.differences():
            self._take_up()

    def run(self, x: Tensor) -> Tensor:
        """Returns the network's output as the graph computes it, which is what bounds are for.

        A private step calls this and not the network. The graph calls the layers; the network's own forward, which
        could find out that it is no longer traced, does not run. For a network that its own ``compile()`` has compiled,
        the graph is compiled in the same way.
        """
        self.refuse_sums_of_torch()
        if any(self._looking):  # trusted hooks of modules that the graph does not call
            with torch.no_grad():
                self._model(x)
        output: Tensor = self._run(x)
        return output

    def refuse_sums_of_torch(self) -> None:
        """Refuses weights whose gradient torch itself would sum over the batch in :meth:`run`.

        The margin of a sensitivity covers the rounding of sums that are formed in pieces, as the scaled layers do. The
        graph calls functions that do so, too.

        Raises:
            CertificationError: If there are such weights; it lists every use of them.
        """
        _refuse(self._of_torch)

    def certify(self, state: SupportsBytes = b"") -> Certificate:
        """Returns bounds for the network and its weights as they are now.

        Args:
            state: What names all bits of the weights, such as a digest; norms that were sealed under it are used again.

        Raises:
            CertificationError: If the network, or a bound at its present weights, cannot be certified.
        """
        self.follow()
        self._constants.begin()
        self.norms.begin(state)
        bounds: dict[fx.Node, Bound] = {}
        problems = self._hidden + _surroundings(self._compute_dtype, self._device)
        for step in self._steps:
            try:
                bounds[step.node] = self._forward(step, bounds)
            except Unbounded as found:
                reason = f"{step.operation.name}: {found.reason}"
                problems.append(Problem(node_path(step.node), reason, found.hint))
                nothing = (0.0,) * len(step.reads)
                bounds[step.node] = Bound(0.0, nothing, parts=(0.0,) * len(step.operation.output_shapes), slots=nothing)
        _refuse(problems)
        at_output = self.loss.lipschitz(self._output.meta["shape"]) * self._margin
        return self._assemble(bounds, self._walk.run(bounds, at_output, self._caps), at_output)

    def _forward(self, step: Step, bounds: dict[fx.Node, Bound]) -> Bound:
        if step.rule is None:
            if step.node.op == "placeholder":
                return Bound(self.input_bound, ())
            index = step.node.args[1]
            assert isinstance(index, int)
            return Bound(bounds[step.reads[0]].parts[index], 1.0, slots=(1.0,))

        def argument(node: fx.Node) -> Any:
            read = bounds.get(node)
            return self._constants.argument(node) if read is None else Value(read.norm, node.meta["shape"])

        args, kwargs = fx.node.map_arg(step.node.args, argument), fx.node.map_arg(step.node.kwargs, argument)
        try:
            bound = step.rule(step.operation, *args, **kwargs)
        except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            what = (str(error) or type(error).__name__).splitlines()[0].partition(" HINT:")[0]
            raise Unbounded(
                f"its rule does not take this call ({what})",
                "call the operation in a plainer way, or register a rule",
            ) from error
        slots = bound.lipschitz if isinstance(bound.lipschitz, tuple) else (bound.lipschitz,)
        if len(slots) != len(step.reads):
            raise Unbounded(
                f"its rule answers for {len(slots)} argument slots, and {len(step.reads)} hold activations",
                "return one Lipschitz constant for each activation that the operation reads",
            )
        _check_uses(step, bound, self._compute_dtype)
        margin, rounded = self._margin, tuple([slot * self._margin for slot in slots])
        return Bound(
            bound.norm * margin, rounded,
            tuple([ParameterUse(use.parameters, use.gradient_factor * margin) for use in bound.uses]),
            bound.quadrature, bound.cotangent_cap * margin, tuple([part * margin for part in bound.parts]), rounded,
        )  # fmt: skip

    def _assemble(self, bounds: dict[fx.Node, Bound], cotangent: dict[fx.Node, float], at_output: float) -> Certificate:
        nodes, uses = [], []
        problems: list[Problem] = []
        trained: set[fx.Node] = set()
        for step in self._steps:
            node, bound = step.node, bounds[step.node]
            received, slots = cotangent[node], bound.slots
            if bound.uses or not trained.isdisjoint(step.reads):
                trained.add(node)  # no cotangent is computed for nodes before the first parameter
            problems += range_problems(node, bound.norm, received if node in trained else 0.0)
            of = step.operation
            nodes.append(NodeBound(node.name, of.name, bound.norm, slots, received, of.output_shape))
            for use in bound.uses:
                reads = bounds[step.reads[0]].norm if step.reads else 0.0
                lipschitz, factor = slots[0] if slots else 0.0, use.gradient_factor
                of_use = UseBound(node.name, step.path, received, factor, reads, lipschitz, step.scalable)
                uses.append((use.parameters, of_use))
        groups = grouped(uses, self._parameters)
        _refuse(problems or _unbounded(groups, self._parameters))
        return Certificate(tuple(nodes), groups, at_output, self.input_bound, self._output.name)


def certify(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_bound: float,
    loss: Loss | nn.Module | str,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Certificate:
    """Returns the certificate of a model as it is now; the arguments are those of :class:`Certifier`.

    Raises:
        CertificationError: If a module or operation cannot be bounded; it lists each with the reason and the fix.
    """
    return Certifier(model, input_shape, input_bound, loss, compute_dtype=compute_dtype).certify()


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise CertificationError(problems)


def _checked(model: nn.Module, input_bound: float, loss: Any, compute_dtype: torch.dtype) -> Loss:
    """Returns the loss as a certified one, or refuses all arguments that are wrong."""
    problems = dtype_problems(model, compute_dtype)
    if not (isinstance(input_bound, int | float) and math.isfinite(input_bound) and input_bound > 0):
        hint = "the radius of the ball that BoundedInput keeps every example in, such as 1.0"
        problems.append(Problem("input_bound", f"{input_bound!r} is not a positive, finite number", hint))
    try:
        certified = as_loss(loss)
    except ValueError as error:
        problems.append(_loss_problem(error))
    if problems:
        raise CertificationError(problems + alterations(model) + structural_problems(model))
    return certified


def _loss_problem(error: ValueError) -> Problem:
    reason, _, hint = str(error).partition(" HINT: ")
    return Problem("loss", reason.rstrip("."), hint.rstrip("."))


def _unbounded(groups: tuple[GroupBound, ...], named: Mapping[str, nn.Parameter]) -> list[Problem]:
    """Finds trained parameters that no use bounds, and groups whose bound is too large to scale noise to."""
    covered = {name for group in groups for name in group.parameters}
    reason = "this trained parameter has no bound: no certified operation uses it"
    hint = "freeze it with requires_grad_(False), remove it, or return a ParameterUse for it from its layer's rule"
    problems = [Problem(n, reason, hint) for n, p in named.items() if p.requires_grad and n not in covered]
    hint = "limit the layers' norms by a projection, or put BoundedInput first"
    sizes = {group.name: group.worst_case for group in groups}
    too_large = {name: f"its sensitivity bound is {size}" for name, size in sizes.items() if not size < LARGEST_BOUND}
    return problems + [Problem(name, reason, hint) for name, reason in too_large.items()]


def _surroundings(compute_dtype: torch.dtype, device: str) -> list[Problem]:
    """Finds contexts of torch under which a pass would not compute what its bounds are for."""
    problems = []
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != compute_dtype:
        reason = f"autocast to {torch.get_autocast_dtype(device)} is on, and the bounds are for {compute_dtype}"
        problems.append(Problem("torch", reason, "set the trainer's precision, or compute_dtype"))
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks on saved tensors may change what backward reads"):
            pass
    except RuntimeError as error:
        problems.append(Problem("torch", str(error), "leave their context before the step"))
    return problems


def _prepare(graph: fx.GraphModule, norms: NormSource, model: nn.Module, names: Mapping[int, str]) -> list[Step]:
    """Returns the nodes that depend on the example, each with its rule; ``names`` maps ids of tensors to names."""
    modules = dict(graph.named_modules())
    steps, problems = [], []
    for node in graph.graph.nodes:
        if node.op == "output" or not depends_on_example(node):
            continue
        reads = tuple(n for n in argument_nodes(node) if depends_on_example(n))
        module = modules[str(node.target)] if node.op == "call_module" else None
        found = module_rule(type(module)) if module is not None else function_rule(node.target)
        member = any(isinstance(n.meta["shape"], list) for n in reads)
        rule = None if node.op == "placeholder" or member else found
        problem = _problem_of(node, member, rule)
        if problem is not None:
            problems.append(Problem(node_path(node), *problem))
            continue
        assert rule is None or callable(rule)
        shape = node.meta["shape"]
        shapes = tuple(shape) if isinstance(shape, list) else (shape,)
        operation = Operation(operation_name(node), module, shapes[0], norms, shapes, names)
        path = "" if module is None or module is model else str(node.target)
        scalable = bool(getattr(module, "scales_gradient", False))
        steps.append(Step(node, rule, reads, operation, path, scalable, _trained(node, module, model)))
    _refuse(problems)
    return steps


def _problem_of(node: fx.Node, member: bool, rule: object) -> tuple[str, str] | None:
    if node.meta["shape"] == MIXED:
        return (
            "its output does not keep the examples apart",
            "keep the batch as the first dimension of every tensor, and reduce over later ones",
        )
    if member:
        takes_member = node.target is operator.getitem and isinstance(node.args[1], int)
        hint = "take its members one by one: a, b = x.chunk(2, dim=1)"
        return None if takes_member else ("it reads a tuple of tensors as a whole", hint)
    if rule is None and node.op != "placeholder":
        hint = "use a supported operation, or register a rule for it (see CONTRIBUTING)"
        return f"{operation_name(node)} has no rule", hint
    return None


def _trained(node: fx.Node, module: nn.Module | None, model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the trained parameters that a node holds or reads, which are part of the network's identity."""
    held = [] if module is None else list(module.parameters())
    read = [operator.attrgetter(str(n.target))(model) for n in argument_nodes(node) if n.op == "get_attr"
            and not str(n.target).startswith("_tensor_constant")]  # fmt: skip
    return frozenset(p for p in (*held, *read) if isinstance(p, nn.Parameter) and p.requires_grad)


def _caps(steps: list[Step], caps: Mapping[str, float], margin: float) -> dict[fx.Node, float]:
    """Returns the radii of clips by node; a module that the graph does not call cannot be clipped."""
    calls = [(str(step.node.target), step.node) for step in steps if step.module is not None]
    called = {path for path, _ in calls}
    if unknown := sorted(set(caps) - called):
        hint = f"name modules that the model calls: {', '.join(sorted(called))}"
        raise CertificationError(
            [Problem(path, "a cotangent clip is asked for, and no such call exists", hint) for path in unknown]
        )
    return {node: caps[path] * margin for path, node in calls if path in caps}


_STEADY = "write a forward that computes the same at every call, from its input, parameters, buffers and constants"

_UNSTEADY = " is a clock, a source of random numbers or an iterator, and gives something else at every call"


def _check_uses(step: Step, bound: Bound, compute_dtype: torch.dtype) -> None:
    """Refuses a trained parameter without a bound on this use, and sums over the batch in bfloat16.

    A bound on another use of the same parameter is not enough, since the gradients of the uses add.
    """
    if step.trained and not step.trained.issubset([p for use in bound.uses for p in use.parameters]):
        raise Unbounded(
            "its rule bounds no gradient for a trained parameter that it uses",
            "return a ParameterUse for it, or freeze it with requires_grad_(False)",
        )
    if compute_dtype == torch.bfloat16:
        refuse_rounded_sum(step, bound)
