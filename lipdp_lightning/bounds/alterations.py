"""What a network holds that neither its graph nor a rule shows: a certificate would be of another network."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from .identity import GLOBAL_HOOKS, MODULE_HOOKS, TrustedHook, set_in_steps
from .reachable import cell_contents
from .trace import Problem


def alterations(network: nn.Module) -> list[Problem]:
    """Hooks, replaced methods, and tensors that need gradients without being parameters."""
    problems = []
    if any(getattr(torch_modules, name) for name in GLOBAL_HOOKS):
        reason = "a hook for all modules may change what they return or the gradient they pass on"
        problems.append(Problem("torch.nn", reason, "remove it before the network is certified"))
    for path, module in network.named_modules():
        problems += [Problem(path or "the network", *found) for found in (*_hooks(module), *_replaced(module))]
        problems += [Problem(f"{path}.{name}".lstrip("."), *_LOOSE) for name in _loose_tensors(module)]
    for name, parameter in network.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            reason = "a hook on it sees, and may change, its gradient before noise is added"
            problems.append(Problem(name, reason, "remove the hook"))
    return problems


_LOOSE = (
    "a tensor that needs a gradient and is not a parameter of the network: what it was made from would be trained, "
    "and no rule bounds that",
    "detach() it, register it as a buffer, or hold it as an nn.Parameter that a layer reads",
)


def _hooks(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name in MODULE_HOOKS:
        for hook in getattr(module, name).values():
            if not isinstance(hook, TrustedHook):
                yield (
                    "a hook on it may change its output or its gradient, and no rule bounds that",
                    "remove the hook, write a layer with a rule, or declare a hook that only looks as a TrustedHook "
                    "of lipdp_lightning.bounds.identity",
                )


def _replaced(module: nn.Module) -> Iterator[tuple[str, str]]:
    kind, engine = type(module), set_in_steps(type(module))
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
    """Whether torch.compile has made ``value`` from the method ``function`` of the module, and from nothing else."""
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


def _loose_tensors(module: nn.Module) -> Iterator[str]:
    for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
        if name not in ("_modules", "_parameters", "_buffers"):
            yield from (
                name for tensor in _tensors(value) if tensor.requires_grad and not isinstance(tensor, nn.Parameter)
            )


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors in a value, also in containers and in the attributes of plain objects."""
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
