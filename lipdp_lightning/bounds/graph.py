"""Tracing: a model becomes a graph of operations, or an error lists why no certificate could rely on one."""

from __future__ import annotations

import gc
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_modules

from .identity import accumulators, modes_of_operations, training_mode
from .inplace import overwrites_outside
from .reachable import GLOBAL_HOOKS, MODULE_HOOKS, TrustedHook, cell_contents, set_in_steps
from .registry import Refusal, function_rule, module_rule


@dataclass(frozen=True)
class Problem:
    """One reason why a model cannot be certified."""

    path: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. HINT: {self.hint}."


class CertificationError(ValueError):
    """Raised if a model cannot be certified; its message lists all problems.

    Args:
        problems: The problems; each is listed once.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        lines = "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(f"the model cannot be certified, {count} problem{'s' * (count > 1)}:\n{lines}")


@contextmanager
def custom_gradients_refused() -> Iterator[None]:
    """Makes every torch.autograd.Function raise, since tracing would record its forward and lose its backward."""
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
    """Returns the graph as text, without the numbers of tensors made in forward, which differ between tracings."""
    return re.sub(r"_tensor_constant\d+", "_tensor_constant", str(graph))


class _Proxy(fx.Proxy):
    """Records ``x += y`` as such; fx.Proxy would record ``x = x + y``, which does not change other names of x."""


def _in_place(function: Callable[..., Any]) -> Callable[[_Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class _HeldProxy(_Proxy):
    """Stands for a parameter or a buffer: operations on its values are recorded, and its shape is a constant."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "ndim", "size", "dim", "numel"):
            return super().__getattr__(name)
        tracer: Any = self.tracer
        path, _, own = str(self.node.target).rpartition(".")
        module: nn.Module = tracer.root.get_submodule(path)
        return getattr({**module._parameters, **module._buffers}[own], name)  # the attribute itself would be a proxy

    def __len__(self) -> int:
        return int(self.shape[0])


@contextmanager
def randomness_refused() -> Iterator[None]:
    """Refuses random numbers that forward draws while it is traced: the graph would hold them as constants."""
    before = torch.random.get_rng_state()
    yield
    if not torch.equal(before, torch.random.get_rng_state()):
        torch.random.set_rng_state(before)
        raise ValueError("it draws random numbers, which the graph would hold as constants")


def is_leaf(module: nn.Module) -> bool:
    """Returns whether tracing stops at a module: it has a rule or a refusal, or is one of torch's own layers."""
    if module_rule(type(module)) is not None:
        return True
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return module.__module__.startswith("torch.nn") and not isinstance(module, containers)


class Undecided(BaseException):
    """Raised if forward decides by an unknown value; its arguments are the node of the value, and the graph so far."""


class _Tracer(fx.Tracer):
    """Stops at leaves and traces all other modules; operations on buffers are in the graph, too."""

    proxy_buffer_attributes = True

    def __init__(self, decided: Iterable[bool]) -> None:
        super().__init__()
        self._decided = iter(decided)

    def to_bool(self, obj: fx.Proxy) -> bool:
        for known in self._decided:
            return known
        raise Undecided(obj.node)

    def create_proxy(self, kind: str, target: Any, args: Any, *rest: Any, **options: Any) -> Any:
        if target is torch._assert:
            assert args[0], args[1]
            return None
        return super().create_proxy(kind, target, args, *rest, **options)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _HeldProxy(node, self) if node.op == "get_attr" else _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_leaf(m) and not torch.is_grad_enabled() and any(p.requires_grad for p in m.parameters()):
            raise TypeError(f"{self.path_of_module(m)} is trained, and called while gradients are switched off")
        return super().call_module(m, forward, args, kwargs)


def trace(model: nn.Module, decided: Iterable[bool] = ()) -> fx.GraphModule:
    """Returns the model's graph; ``decided`` holds what forward is told, one by one, when it decides by a value.

    Raises:
        CertificationError: If forward cannot be traced, for instance since control flow depends on the mode.
        Undecided: If forward decides by more values.
    """
    if module_rule(type(model)) is not None:
        model = nn.Sequential(model)
    kept = set(vars(model))
    try:
        with custom_gradients_refused(), randomness_refused(), torch.inference_mode(False), torch.enable_grad():
            with training_mode(model, True):
                graph = _Tracer(decided).trace(model)
            with training_mode(model, False):
                in_evaluation = _Tracer(decided).trace(model)
        if _text(graph) != _text(in_evaluation):
            raise ValueError("it computes one thing in training and another in evaluation mode")
        return fx.GraphModule(model, graph)  # it writes the graph as code, which may fail on unusual calls
    except Undecided as found:
        raise Undecided(found.args[0], fx.GraphModule(model, found.args[0].graph)) from None
    except Exception as error:  # a user's forward may raise anything on proxies
        reason = (
            f"its forward cannot be traced ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        hint = (
            "write a forward without if, for or len on tensor values, or put the part into a module with a rule "
            "of its own (see CONTRIBUTING)"
        )
        raise CertificationError([Problem(type(model).__name__, reason, hint)]) from error
    finally:
        for name in [n for n in vars(model) if n.startswith("_tensor_constant") and n not in kept]:
            delattr(model, name)  # the graph holds it, too


def with_calls(graph: fx.GraphModule, calls: Mapping[fx.Node, Callable[..., Any]]) -> fx.GraphModule:
    """Returns a graph over the same modules and tensors that calls other functions at some of its nodes."""
    copied: dict[fx.Node, Any] = {}
    fresh = fx.Graph()
    fresh.output(fresh.graph_copy(graph.graph, copied))
    for node, function in calls.items():
        copied[node].target = function
    return fx.GraphModule(graph, fresh)


def made_from_input(graph: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes that depend on the input; the others use constants, buffers and parameters alone."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def operation_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def node_path(node: fx.Node) -> str:
    """Returns the place in the user's model that a node comes from."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    inside = next(reversed(stack.values()))[0] if stack else ""
    return f"{inside or 'forward'}, {operation_name(node)}"


_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})
_METHODS = frozenset({"size", "numel", "dim", "ndimension"})
ARITHMETIC: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.getitem, operator.mul, operator.add, operator.sub, operator.floordiv, operator.truediv,
        operator.neg, operator.pos, operator.imul, operator.iadd, operator.isub, operator.itruediv,
    }
)  # fmt: skip
_OF_PUBLIC_NUMBERS: frozenset[Callable[..., Any]] = frozenset(
    {operator.mod, operator.abs, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge}
)


def may_be_number(node: fx.Node) -> bool:
    """Returns whether the node may compute a number, which needs no rule; if it computes a tensor, it needs one."""
    return node.target is getattr or reads_sizes(node)


def reads_sizes(node: fx.Node) -> bool:
    """Returns whether the node reads a tensor's shape, or computes with numbers."""
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is getattr:
        return len(node.args) == 2 and node.args[1] in _ATTRIBUTES
    return node.target is torch.numel or node.target in ARITHMETIC | _OF_PUBLIC_NUMBERS


def unsupported(graph: fx.GraphModule) -> list[Problem]:
    """Returns a problem for every node that has no rule or overwrites memory that is read elsewhere."""
    problems = []
    modules, from_input = dict(graph.named_modules()), made_from_input(graph)
    for node in graph.graph.nodes:
        if overwrites_outside(node, modules[str(node.target)] if node.op == "call_module" else None):
            reason = f"{operation_name(node)} overwrites, in place, the input or another value that is read elsewhere"
            problems.append(Problem(node_path(node), reason, "use the operation that returns a new tensor"))
        if node not in from_input:
            continue  # its value is computed for every certificate, and needs no bound
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


def structural_problems(model: nn.Module) -> list[Problem]:
    """Returns the problems of a model's operations; if it cannot be traced, also those of modules that have no rule."""
    try:
        return unsupported(trace(model))
    except Undecided as undecided:
        node = undecided.args[0]
        problems = [] if _is_of_sizes(node) else [decision_problem(node)]  # sizes are known to a certificate
    except CertificationError as error:
        problems = list(error.problems)
    found = [(path, module, module_rule(type(module))) for path, module in model.named_modules()]
    return [*problems, *(Problem(path, f"{type(module).__name__}: {refusal.reason}", refusal.hint)
                         for path, module, refusal in found if isinstance(refusal, Refusal))]  # fmt: skip


def decision_problem(node: fx.Node) -> Problem:
    """Returns the problem of a forward that decides by a node's value."""
    reason = "its forward cannot be traced, it decides by values of tensors, or by the private batch size"
    hint = "decide by sizes of an example, as x.shape[1] > 4 does, or put the part into a layer with a rule"
    return Problem(node_path(node), reason, hint)


def _is_of_sizes(node: fx.Node) -> bool:
    """Returns whether the node's value may be computed from sizes of tensors alone."""
    reads_a_tensor = node.target not in ARITHMETIC | _OF_PUBLIC_NUMBERS
    return reads_sizes(node) and (reads_a_tensor or all(map(_is_of_sizes, node.all_input_nodes)))


# ---- parts of a network that neither its graph nor a rule shows


def alterations(network: nn.Module) -> list[Problem]:
    """Returns a problem for every hook, every replaced method, and every tensor that is trained but no parameter."""
    problems = [Problem("torch", mode, "leave it before the network is certified") for mode in modes_of_operations()]
    if hooked_everywhere():
        reason = "a hook for all modules may change what they return or the gradient they pass on"
        problems.append(Problem("torch.nn", reason, "remove it before the network is certified"))
    for path, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            problems.append(Problem(path or "the network", "it is compiled by torch.jit, which hides what it computes",
                                    "use the module that it was compiled from"))  # fmt: skip
            continue
        problems += [Problem(path or "the network", *found) for found in (*_hooks(module), *_replaced(module))]
        problems += [Problem(f"{path}.{name}".lstrip("."), *found) for name, found in _odd_tensors(module)]
    for name, parameter in network.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            reason = "a hook on it sees, and may change, its gradient before noise is added"
            problems.append(Problem(name, reason, "remove the hook"))
        elif parameter.requires_grad and parameter.is_leaf and any(gc.get_referents(*accumulators([parameter]))):
            reason = "a hook on the autograd node that adds to its grad may change the sum before noise is added"
            problems.append(Problem(name, reason, "remove the hook"))
    return problems


_LOOSE = (
    "a tensor that needs a gradient and is not a parameter of the network: what it was made from would be trained, "
    "and no rule bounds that",
    "detach() it, register it as a buffer, or hold it as an nn.Parameter that a layer reads",
)


_CLASS = (
    "a tensor of a class of its own, whose operations may compute something else than those of torch.Tensor",
    "convert it to a torch.Tensor or an nn.Parameter",
)


def hooked(module: nn.Module) -> bool:
    """Returns whether a hook that nobody vouches for would be called with the module."""
    hooks = [hook for name in MODULE_HOOKS for hook in getattr(module, name).values()]
    return not all(isinstance(hook, TrustedHook) for hook in hooks)


def hooked_everywhere() -> bool:
    """Returns whether a hook would be called with every module."""
    return any(getattr(torch_modules, name) for name in GLOBAL_HOOKS)


def _hooks(module: nn.Module) -> Iterator[tuple[str, str]]:
    if hooked(module):
        yield (
            "a hook on it may change its output or its gradient, and no rule bounds that",
            "remove the hook, write a layer with a rule, or declare a hook that only looks as a TrustedHook "
            "of lipdp_lightning.bounds.identity",
        )


def _replaced(module: nn.Module) -> Iterator[tuple[str, str]]:
    kind, engine = type(module), set_in_steps(type(module))
    if kind._call_impl is not nn.Module._call_impl:
        yield "its class replaces nn.Module._call_impl, which the graph does not contain", "override forward alone"
    for name, value in vars(module).items():
        inherited = getattr(kind, name, None)
        if name == "_compiled_call_impl":
            if value is None or compiles(module, value, nn.Module._call_impl):
                continue
        elif not callable(inherited) or not callable(value) or isinstance(value, nn.Module) or name in engine:
            continue
        yield (
            f"its {name.removeprefix('_compiled_')} was replaced on the instance, and the rule of its class no longer "
            "holds",
            "write a subclass with a forward of its own",
        )


def compiles(module: nn.Module, value: Any, function: Any) -> bool:
    """Returns whether torch.compile has made ``value`` from the method ``function`` of the module alone."""
    if not hasattr(value, "_torchdynamo_orig_callable"):
        return False
    wrappers, seen = [value], set()
    while wrappers:
        one = wrappers.pop()
        if getattr(one, "__self__", None) is module and getattr(one, "__func__", None) is function:
            return True
        if id(one) not in seen and isinstance(one, types.FunctionType):
            seen.add(id(one))
            wrappers += [*cell_contents(one), getattr(one, "_torchdynamo_orig_callable", None)]
    return False


def compiled_alike(network: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled as the network's own ``compile()`` has compiled the network, if it has."""
    held = cell_contents(network._compiled_call_impl)
    compilers = [one for one in held if any(kind.__name__ == "_TorchDynamoContext" for kind in type(one).__mro__)]
    return compilers[0](function) if compilers else function  # type: ignore[operator]


def _odd_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the names of tensors that are trained but no parameters, and of those with operations of their own."""
    for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
        if name not in ("_modules", "_parameters", "_buffers"):
            for tensor in _tensors(value):
                if type(tensor) not in (Tensor, nn.Parameter):
                    yield name, _CLASS
                elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                    yield name, _LOOSE


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yields the tensors in a value, also those in containers and in the attributes of plain objects."""
    todo, seen = [value], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list | tuple | set):
            todo += one
        elif hasattr(one, "__dataclass_fields__") or type(one).__name__ == "SimpleNamespace":
            todo += vars(one).values()
