"""From a model to a graph of operations with the shape of one example at every node."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .inplace import overwrites_shared_value
from .registry import function_rule, module_rule
from .values import BatchNumber, Constant

PROBE_BATCHES = (2, 3)


@dataclass(frozen=True)
class Problem:
    """One reason why a model cannot be certified."""

    path: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. HINT: {self.hint}."


class CertificationError(ValueError):
    """Everything that stands between a model and its certificate, in one message."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        lines = "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(f"the model cannot be certified, {count} problem{'s' * (count > 1)}:\n{lines}")


@contextmanager
def training_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """Every module in one mode, and afterwards each in its own."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(mode)
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def custom_gradients_refused() -> Iterator[None]:
    """While tracing, a torch.autograd.Function raises: its forward would be recorded and its backward lost."""
    function = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"it calls the torch.autograd.Function {cls.__name__}, whose backward has no bound")

    try:
        function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        yield
    finally:
        function.apply = original  # type: ignore[method-assign]


def _text(graph: fx.Graph) -> str:
    """The graph as text; tensors made in forward get a new name at every tracing."""
    return re.sub(r"_tensor_constant\d+", "_tensor_constant", str(graph))


class _Proxy(fx.Proxy):
    """Records ``x += y`` as it is; fx.Proxy would record ``x = x + y``, which leaves other names of x alone."""


def _in_place(function: Callable[..., Any]) -> Callable[[_Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


@contextmanager
def randomness_refused() -> Iterator[None]:
    """What forward draws while it is traced would be recorded as a constant."""
    before = torch.random.get_rng_state()
    yield
    if not torch.equal(before, torch.random.get_rng_state()):
        torch.random.set_rng_state(before)
        raise ValueError("it draws random numbers, which the graph would hold as constants")


class _Tracer(fx.Tracer):
    """Stops at modules that have a rule or a refusal, and at torch's own leaves; walks through the rest."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_rule(type(m)) is not None:
            return True
        return m.__module__.startswith("torch.nn") and not isinstance(
            m, nn.Sequential | nn.ModuleList | nn.ModuleDict
        )


def trace(model: nn.Module) -> fx.GraphModule:
    """The model's graph; control flow that depends on values raises a CertificationError."""
    if module_rule(type(model)) is not None:
        model = nn.Sequential(model)
    try:
        with custom_gradients_refused(), randomness_refused(), training_mode(model, True):
            graph = _Tracer().trace(model)
        with custom_gradients_refused(), training_mode(model, False):
            in_evaluation = _Tracer().trace(model)
        if _text(graph) != _text(in_evaluation):
            raise ValueError("it computes one thing in training and another in evaluation mode")
    except Exception as error:  # whatever a user's forward raises on proxies
        reason = f"its forward cannot be traced ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        hint = (
            "write a forward without if, for or len on tensor values, or put the part into a module with a rule "
            "of its own (see CONTRIBUTING)"
        )
        raise CertificationError([Problem(type(model).__name__, reason, hint)]) from error
    return fx.GraphModule(model, graph)


def operation_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def node_path(node: fx.Node) -> str:
    """Where in the user's model a node comes from."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    inside = next(reversed(stack.values()))[0] if stack else ""
    return f"{inside or 'forward'}, {operation_name(node)}"


def altered(model: nn.Module) -> list[Problem]:
    """Hooks that may change what a module returns or the gradient it passes on; the graph does not show them."""
    problems = []
    for path, module in model.named_modules():
        traced_through = module_rule(type(module)) is None
        forward = bool(module._forward_hooks or module._forward_pre_hooks) and not traced_through
        if forward or module._backward_hooks or module._backward_pre_hooks:
            reason = "a hook on it may change its output or its gradient, and no rule bounds that"
            problems.append(Problem(path or "model", reason, "remove the hook, or write a layer with a rule"))
        if "forward" in vars(module) and not traced_through:
            reason = "its forward was replaced on the instance, and the rule of its class no longer holds"
            problems.append(Problem(path or "model", reason, "write a subclass with a forward of its own"))
    return problems


def unsupported(graph: fx.GraphModule) -> list[Problem]:
    """Every node without a rule; needs no shapes."""
    problems = []
    modules = dict(graph.named_modules())
    for node in graph.graph.nodes:
        if overwrites_shared_value(node, modules):
            reason = f"{operation_name(node)} overwrites, in place, a value that is read elsewhere"
            problems.append(Problem(node_path(node), reason, "use the operation that returns a new tensor"))
        if node.op == "call_module":
            kind = type(modules[str(node.target)])
            found = module_rule(kind)
            what = (
                f"torch.nn.{kind.__qualname__}"
                if kind.__module__.startswith("torch.nn")
                else kind.__qualname__
            )
        elif node.op in ("call_function", "call_method"):
            found, what = function_rule(node.target), operation_name(node)
            if found is None and what in _SHAPE_ONLY:
                continue
        else:
            continue
        if found is None:
            hint = (
                "register a rule for it (CONTRIBUTING, 'a rule for your own layer'), or use a supported layer"
            )
            problems.append(Problem(node_path(node), f"{what} has no rule", hint))
        elif not callable(found):
            problems.append(Problem(node_path(node), f"{what}: {found.reason}", found.hint))
    return problems


# Functions and methods that yield numbers for shapes; they carry no example's values.
_SHAPE_ONLY = frozenset(
    {
        "size",
        "dim",
        "getattr",
        "numel",
        "floordiv",
        "mod",
        "prod",
        "ndimension",
        "getitem",
        "mul",
        "add",
        "sub",
    }
)


class _ShapeInterpreter(fx.Interpreter):
    """Runs the graph on zeros and keeps what every node returned, as shapes and numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.seen[n.name] = fx.node.map_aggregate(
            result, lambda v: torch.Size(v.shape) if isinstance(v, Tensor) else v
        )
        return result


def _run(
    graph: fx.GraphModule, batch: int, input_shape: tuple[int, ...], like: Tensor | None
) -> dict[str, Any]:
    dtype = like.dtype if like is not None else torch.get_default_dtype()
    device = like.device if like is not None else "cpu"
    interpreter = _ShapeInterpreter(graph)
    with torch.no_grad():
        interpreter.run(torch.zeros((batch, *input_shape), dtype=dtype, device=device))
    return interpreter.seen


def propagate_shapes(graph: fx.GraphModule, input_shape: tuple[int, ...]) -> None:
    """Store in ``node.meta["shape"]`` one example's shape (a tuple of them for a tuple output), or a number.

    The graph runs at two batch sizes: a tensor whose first dimension does not follow the batch, or whose
    other dimensions do, mixes examples and is recorded as a string that says so.
    """
    like = next((p for p in graph.parameters()), None)
    try:
        with training_mode(graph, False):
            first, second = (_run(graph, batch, input_shape, like) for batch in PROBE_BATCHES)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = f"it fails on an input of shape (batch, {', '.join(map(str, input_shape))}): {str(error).splitlines()[0]}"
        raise CertificationError(
            [Problem("forward", reason, "check input_shape, given without the batch")]
        ) from error
    for node in graph.graph.nodes:
        node.meta["shape"] = _shape_of(node, first[node.name], second[node.name])


MIXED = "mixed"


def depends_on_example(node: fx.Node) -> bool:
    """Whether the node's output is a tensor, or a tuple of tensors, made from the input."""
    return isinstance(node.meta["shape"], tuple | list) or node.meta["shape"] == MIXED


def argument_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes in the argument slots, in order and with multiplicity; ``node.all_input_nodes`` lists each once."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    return tuple(found)


def _shape_of(node: fx.Node, first: Any, second: Any) -> Any:
    """One example's shape; a list for a tuple output; MIXED; the number itself; or None for constants."""
    if node.op in ("get_attr", "output"):
        return None
    made_from_input = node.op == "placeholder" or any(depends_on_example(n) for n in argument_nodes(node))
    if isinstance(first, torch.Size):
        if not made_from_input:
            return None
        follows = len(first) > 0 and (first[0], second[0]) == PROBE_BATCHES and first[1:] == second[1:]
        return tuple(first[1:]) if follows else MIXED
    if isinstance(first, tuple | list) and first and all(isinstance(v, torch.Size) for v in first):
        parts = [_shape_of(node, a, b) for a, b in zip(first, second, strict=True)]
        return MIXED if MIXED in parts else parts
    same = first == second and not any(_counts_examples(n) for n in argument_nodes(node))
    return Number(first if same else BatchNumber(first))


def _counts_examples(node: fx.Node) -> bool:
    """Whether it is a number made from the batch size; what is computed from it may agree at both probes."""
    shape = node.meta["shape"]
    return (
        isinstance(shape, Number)
        and isinstance(shape.value, BatchNumber)
        and not isinstance(shape.value.value, tuple)  # of a whole shape, single entries may be public
    )


@dataclass(frozen=True)
class Number:
    """A value of the graph that is not a tensor."""

    value: Any


def constant_of(model: nn.Module, target: str) -> Constant | nn.Parameter:
    """The buffer or parameter that a get_attr node reads, as it is in the model now."""
    found: Any = model
    for part in target.split("."):
        found = getattr(found, part)
    return found if isinstance(found, nn.Parameter) else Constant(found)
