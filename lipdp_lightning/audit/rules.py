"""Compares each rule with the operation that it describes, on measured input norms in place of bounds.

Along a deep graph the bounds are loose, and a wrong constant of one rule may hide behind the slack of the others. Here
nothing accumulates: at every node the measured input norms go into the rule, and its answers are compared with the
output, the Jacobian's norm in each slot, and the gradient's norm per unit of cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from ..bounds.certifier import Certifier
from ..bounds.losses import Loss
from ..bounds.registry import Bound
from .attack import prepared
from .measure import ratio


@dataclass(frozen=True)
class RuleRatio:
    """The largest measured over claimed at one node: output norm, Jacobian norm, and gradient per cotangent."""

    rule: str
    node: str
    output: float
    lipschitz: float
    gradient: float

    @property
    def worst(self) -> float:
        return max(self.output, self.lipschitz, self.gradient)


def rule_ratios(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_bound: float,
    loss: Loss | nn.Module | str,
    inputs: Tensor,
    *,
    seed: int = 0,
    rounds: int = 6,
) -> tuple[RuleRatio, ...]:
    """Returns one RuleRatio for each operation over the given inputs; Jacobian norms come from power iteration.

    Args:
        model: the network whose rules are tested.
        input_shape: the shape of one example.
        input_bound: the largest norm of an example.
        loss: the loss that the certificate is for.
        inputs: the examples to measure, as a batch.
        seed: seed of the starting vectors.
        rounds: rounds of the power iteration.
    """
    subject = prepared(model, seed)
    certifier = Certifier(subject, input_shape, input_bound, loss, compute_dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, RuleRatio] = {}
    for x in inputs.double():
        values = _values(certifier, x.unsqueeze(0))
        for step in certifier._steps:
            if step.rule is None:
                continue
            seen = _one(certifier, step, values, generator, rounds)
            old = found.get(seen.node, seen)
            found[seen.node] = RuleRatio(
                seen.rule, seen.node, max(seen.output, old.output), max(seen.lipschitz, old.lipschitz),
                max(seen.gradient, old.gradient),
            )  # fmt: skip
    return tuple(found.values())


def _values(certifier: Certifier, x: Tensor) -> dict[fx.Node, Any]:
    interpreter = fx.Interpreter(certifier._graph, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(x)
    return dict(interpreter.env)


def _flat(value: Any) -> Tensor:
    parts = value if isinstance(value, tuple | list) else (value,)
    return torch.cat([p.reshape(-1) for p in parts])


def _one(
    certifier: Certifier, step: Any, values: dict[fx.Node, Any], generator: torch.Generator, rounds: int
) -> RuleRatio:
    measured = {n: Bound(float(_flat(values[n]).norm()), ()) for n in step.reads}
    bound = certifier._forward(step, measured)
    output = float(ratio(_flat(values[step.node]).norm().reshape(1), bound.norm))
    reads = list(dict.fromkeys(step.reads))
    trained = list({id(p): p for use in bound.uses for p in use.parameters}.values())

    def apply(at: dict[fx.Node, Tensor], parameters: Sequence[Tensor]) -> Tensor:
        return _flat(_call(certifier, step, {**values, **at}, dict(zip(map(id, trained), parameters, strict=True))))

    slots = [
        sum(c for n, c in zip(step.reads, bound.slots, strict=True) if n is read)
        if not bound.quadrature
        else sum(c * c for n, c in zip(step.reads, bound.slots, strict=True) if n is read) ** 0.5
        for read in reads
    ]

    def at_read(read: fx.Node, vector: list[Tensor]) -> Tensor:
        return apply({read: vector[0]}, trained)

    lipschitz = [
        _operator_norm(partial(at_read, n), [values[n]], generator, rounds) / claimed if claimed > 0 else 0.0
        for n, claimed in zip(reads, slots, strict=True)
    ]
    gradient = 0.0
    if trained:
        claimed = sum(use.gradient_factor for use in bound.uses)
        size = _operator_norm(lambda v: apply({}, v), [p.detach() for p in trained], generator, rounds)
        gradient = size / claimed if claimed > 0 else float(size > 1e-12) * torch.inf
    kind = type(step.module).__name__ if step.module is not None else _name(step.node)
    return RuleRatio(kind, step.node.name, output, max(lipschitz, default=0.0), gradient)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _call(certifier: Certifier, step: Any, values: dict[fx.Node, Any], weights: dict[int, Tensor]) -> Any:
    node = step.node

    def pick(n: fx.Node) -> Any:
        value = values[n]
        if id(value) in weights:
            return weights[id(value)]
        # in-place operations must not overwrite recorded values
        return value.clone() if isinstance(value, Tensor) else value

    args, kwargs = fx.node.map_arg(node.args, pick), fx.node.map_arg(node.kwargs, pick)
    if step.module is not None:
        own = {n: weights[id(p)] for n, p in step.module.named_parameters() if id(p) in weights}
        return functional_call(step.module, own, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _operator_norm(
    function: Callable[[list[Tensor]], Tensor], at: list[Tensor], generator: torch.Generator, rounds: int
) -> float:
    """Returns a lower bound on the Jacobian's norm, from u -> J J^T u, where J v is the derivative of u ->
    <J^T u, v>.
    """
    points = [a.detach().clone().requires_grad_() for a in at]
    with torch.enable_grad():
        result = function(points)
        u = torch.randn(result.shape, dtype=result.dtype, generator=generator)
        largest = 0.0
        for _ in range(rounds):
            u = (u / u.norm().clamp_min(1e-30)).detach().requires_grad_()
            pulled = torch.autograd.grad(
                result, points, u, create_graph=True, allow_unused=True, materialize_grads=True
            )
            size = float(torch.cat([p.detach().reshape(-1) for p in pulled]).norm())
            largest = max(largest, size)
            if size == 0.0 or not any(p.requires_grad for p in pulled):
                break
            u = _pushed(pulled, u)
            if float(u.norm()) == 0.0:
                break
    return largest


def _pushed(pulled: Sequence[Tensor], u: Tensor) -> Tensor:
    """Returns J J^T u; where torch lacks the second derivative, it returns u with its entries rolled by one."""
    try:
        (result,) = torch.autograd.grad(
            pulled, u, [p.detach() for p in pulled], retain_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return u.detach().roll(1)
    return result
