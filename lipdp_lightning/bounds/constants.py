"""Values of a graph that no example enters, worked out anew for every certificate."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from .batch_numbers import counts_examples
from .sizes import Number
from .trace import made_from_input
from .values import Constant, Unbounded

_FROM_WEIGHTS = (
    "it reads a tensor that forward computes from a trained parameter, whose gradient no rule bounds",
    "let layers read their weights directly, or detach() what is computed from them",
)
_FROM_CONSTANTS = (
    "it reads a tensor that forward computes from constants or weights alone",
    "register constants as buffers, and let layers read their weights directly",
)


class Constants:
    """Buffers, parameters, and what forward computes from them alone, as they are in the network now."""

    def __init__(self, network: nn.Module, graph: fx.GraphModule) -> None:
        self._network, self._graph = network, graph
        self._from_input = made_from_input(graph)
        self._known: dict[fx.Node, Any] = {}

    def begin(self) -> None:
        """Forget the values of the last walk: buffers and weights may have changed."""
        self._known = {}

    def argument(self, node: fx.Node) -> Any:
        """The value as a rule is given it: a parameter, a Constant, or a number."""
        value = self._value(node)
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise Unbounded(*_FROM_WEIGHTS)
            return Constant(value)
        return value

    def _value(self, node: fx.Node) -> Any:
        if node not in self._known:
            self._known[node] = self._work_out(node)
        return self._known[node]

    def _work_out(self, node: fx.Node) -> Any:
        shape = node.meta["shape"]
        if isinstance(shape, Number) and node in self._from_input:
            return shape.value
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        if node.op not in ("call_function", "call_method") or _counts_examples((args, kwargs)):
            raise Unbounded(*_FROM_CONSTANTS)
        parameters = _parameters_in((args, kwargs))
        if parameters and node.target not in ("detach", torch.detach, torch.Tensor.detach, getattr):
            raise Unbounded(*(_FROM_WEIGHTS if any(p.requires_grad for p in parameters) else _FROM_CONSTANTS))
        with torch.enable_grad():
            if node.op == "call_method":
                receiver, *rest = args
                return getattr(receiver, str(node.target))(*rest, **kwargs)
            function: Any = node.target
            return function(*args, **kwargs)

    def _attribute(self, target: str) -> Any:
        held: Any = self._graph if target.startswith("_tensor_constant") else self._network
        return operator.attrgetter(target)(held)


def _counts_examples(values: Any) -> bool:
    return any(counts_examples(value) for value in _members(values))


def _parameters_in(values: Any) -> list[nn.Parameter]:
    return [v for v in _members(values) if isinstance(v, nn.Parameter)]


def _members(values: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(values, found.append)
    return found
