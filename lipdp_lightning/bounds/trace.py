"""From a model to a graph of operations, or to the reasons why it has none that a certificate could trust."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .inplace import overwrites_outside
from .registry import function_rule, module_rule
from .sizes import may_be_number


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
        function.apply = classmethod(apply)
        yield
    finally:
        function.apply = original


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
        return m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential | nn.ModuleList | nn.ModuleDict)


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
        return fx.GraphModule(model, graph)  # which writes the graph as code, and so may fail on unusual calls
    except Exception as error:  # whatever a user's forward raises on proxies
        reason = (
            f"its forward cannot be traced ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        hint = (
            "write a forward without if, for or len on tensor values, or put the part into a module with a rule "
            "of its own (see CONTRIBUTING)"
        )
        raise CertificationError([Problem(type(model).__name__, reason, hint)]) from error


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
        if overwrites_outside(node, modules[str(node.target)] if node.op == "call_module" else None):
            reason = f"{operation_name(node)} overwrites, in place, the input or another value that is read elsewhere"
            problems.append(Problem(node_path(node), reason, "use the operation that returns a new tensor"))
        if node.op == "call_module":
            kind = type(modules[str(node.target)])
            found = module_rule(kind)
            what = f"torch.nn.{kind.__qualname__}" if kind.__module__.startswith("torch.nn") else kind.__qualname__
        elif node.op in ("call_function", "call_method"):
            found, what = function_rule(node.target), operation_name(node)
            if found is None and may_be_number(node):
                continue
        else:
            continue
        if found is None:
            hint = "register a rule for it (CONTRIBUTING, 'a rule for your own layer'), or use a supported layer"
            problems.append(Problem(node_path(node), f"{what} has no rule", hint))
        elif not callable(found):
            problems.append(Problem(node_path(node), f"{what}: {found.reason}", found.hint))
    return problems
