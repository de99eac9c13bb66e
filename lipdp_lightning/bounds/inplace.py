"""In-place operations, which are sound only if nothing else reads the memory that they overwrite."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from .identity import training_mode
from .registry import Rule, function_rule, module_rule

_IN_PLACE_FUNCTIONS = frozenset({operator.iadd, operator.isub, operator.imul, operator.itruediv})
_CALLS = ("call_module", "call_function", "call_method")
_LIBRARY = __name__.partition(".")[0]

Sharing = dict[fx.Node, set[fx.Node]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value, a tuple of values or nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def rule_of(node: fx.Node, module: nn.Module | None) -> Rule | None:
    found = module_rule(type(module)) if module is not None else function_rule(node.target)
    return found if callable(found) else None


class MemoryInterpreter(fx.Interpreter):
    """Runs a graph and finds, by trying, which nodes overwrite an argument and which may return an argument's memory.

    A node is tried on its own arguments in every memory layout of :func:`_laid_out`, and a module in both modes, since
    these decide whether ``reshape``, ``contiguous`` or a dropout copies. An operation whose rule is not of this library
    may do more than a trial shows, so it counts as one that returns the memory of every argument.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.overwrites: Sharing = {}
        self.shares: Sharing = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in _CALLS:
            self._observe(n, {read: self.env[read] for read in n.all_input_nodes})
        return super().run_node(n)

    def _observe(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        module = self.submodules.get(str(node.target)) if node.op == "call_module" else None
        rule = rule_of(node, module)
        holders = {read for read, value in values.items() if any(True for _ in tensors_in(value))}
        shares, overwrites = self.shares.setdefault(node, set()), self.overwrites.setdefault(node, set())
        tried = False
        for layout, training in product(range(_LAYOUTS), _modes(module)):
            try:
                laid = {read: _laid_out(value, layout) for read, value in values.items()}
                before = {read: versions(laid[read]) for read in holders}
                result = self._try(node, laid, module, training)
            except Exception:  # the operation may not work in this layout or mode, as a view of a transpose does not
                continue
            tried = True
            memory = {_memory(t) for t in tensors_in(result)}
            shares |= {read for read in holders if any(_memory(t) in memory for t in tensors_in(laid[read]))}
            overwrites |= {read for read in holders if versions(laid[read]) != before[read]}
        if not tried or (rule is not None and not of_library(rule)):
            shares |= holders

    def _try(self, node: fx.Node, values: dict[fx.Node, Any], module: nn.Module | None, training: bool) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if module is None:
            return getattr(self, node.op)(node.target, args, kwargs)
        with training_mode(module, training), torch.random.fork_rng(devices=[]):
            return module(*args, **kwargs)


_LAYOUTS = 4


def _modes(module: nn.Module | None) -> tuple[bool, ...]:
    """Returns the modes to try: evaluation, and training if that changes a mode."""
    if module is None:
        return (False,)
    before = [part.training for part in module.modules()]
    with training_mode(module, True):
        differs = before != [part.training for part in module.modules()]
    return (False, True) if differs else (False,)


def _laid_out(value: Any, layout: int) -> Any:
    """Returns a copy of the value: in order, with the second dimension last in memory, reversed, or as it is."""
    if isinstance(value, tuple | list):
        return type(value)(_laid_out(v, layout) for v in value)
    if not isinstance(value, Tensor):
        return value
    if layout == 3:
        return value.detach().clone()
    order = list(range(value.dim()))
    if layout == 1 and len(order) > 2:
        order = [0, *order[2:], 1]
    elif layout == 2:
        order.reverse()
    back = [order.index(d) for d in range(len(order))]
    return value.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def versions(value: Any) -> list[int]:
    return [t._version for t in tensors_in(value) if not t.is_inference()]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def of_library(rule: Rule) -> bool:
    return rule.__module__.partition(".")[0] == _LIBRARY


def may_overwrite(node: fx.Node, module: nn.Module | None) -> bool:
    """Returns whether the node might overwrite an argument, by its name, its options, its parts or its rule."""
    rule = rule_of(node, module)
    parts = () if module is None else module.modules()
    inside = any(getattr(part, "inplace", False) for part in parts)
    return overwriting(node, module) or inside or (rule is not None and not of_library(rule))


def overwriting(node: fx.Node, module: nn.Module | None) -> bool:
    """Returns whether the node's name or options say that it overwrites an argument."""
    if node.op == "call_module":
        return bool(getattr(module, "inplace", False))
    if node.op not in _CALLS:
        return False
    # the names of torch's in-place operations end with an underscore: relu_, add_, F.elu_
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    if node.target in _IN_PLACE_FUNCTIONS or node.kwargs.get("out") is not None:
        return True
    return bool(node.kwargs.get("inplace", False))


def _operand(node: fx.Node) -> object:
    return node.args[0] if node.args else node.kwargs.get("input")


def overwrites_outside(node: fx.Node, module: nn.Module | None) -> bool:
    """Returns whether the node's name or options say that it overwrites the input, a buffer, a parameter or ``out``."""
    if not overwriting(node, module):
        return False
    operand = _operand(node)
    return not isinstance(operand, fx.Node) or operand.op not in _CALLS or node.kwargs.get("out") is not None


def overwrites_shared_memory(node: fx.Node, module: nn.Module | None, found: MemoryInterpreter) -> bool:
    """Returns whether the node overwrites memory that another node reads, directly or through a view.

    In the graph, that reader would still have the old value with its bound.
    """
    if overwrites_outside(node, module):
        return True
    operands = set(found.overwrites.get(node, ()))
    operand = _operand(node)
    if overwriting(node, module) and isinstance(operand, fx.Node):
        operands.add(operand)
    return not all(_exclusive(operand, node, found.shares) for operand in operands)


def _exclusive(value: fx.Node, reader: fx.Node, shares: Sharing) -> bool:
    """Returns whether nothing but ``reader`` reads the value, or memory that it may share."""
    if value.op not in _CALLS or set(value.users) != {reader}:
        return False
    return all(_exclusive(source, value, shares) for source in shares[value])
