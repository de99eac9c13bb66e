"""Holds what an attack found: one ratio of measured to certified for every claim of the certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """One claim and the largest ratio found; above 1, the claim is false."""

    claim: str
    ratio: float


@dataclass(frozen=True)
class GroupRatio:
    """The largest ||g_ik|| / Delta_k, unscaled against ``worst_case`` and by layer against ``layerwise``.

    The ``float32`` ratios are those of the final candidates on the training path: the layers' own backward with their
    gradient scalers, in float32.
    """

    name: str
    worst_case: float
    layerwise: float
    worst_case_float32: float = 0.0
    layerwise_float32: float = 0.0


@dataclass(frozen=True)
class NodeRatio:
    """The largest measured norm of one operation's output over X_v, and of its cotangent over l_v.

    At the input the forward ratio is 1 by construction and is no claim.
    """

    name: str
    operation: str
    forward: float
    cotangent: float
    is_input: bool = False


@dataclass(frozen=True)
class AttackReport:
    """Every ratio of one attack; ``witnesses`` maps a claim to the input and the target that attained it.

    ``interaction`` measures how much the examples of a batch influence each other. Anything above zero is a violation
    of infinite ratio, because then no bound on a single example bounds anything.
    """

    groups: tuple[GroupRatio, ...]
    nodes: tuple[NodeRatio, ...]
    joint: float
    joint_float32: float
    loss_gradient: float
    interaction: float
    restarts: int
    steps: int
    seed: int
    weights: bool
    witnesses: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def claims(self) -> Iterator[Finding]:
        for group in self.groups:
            for scaling in ("worst_case", "layerwise"):
                yield Finding(f"group {group.name}, {scaling}", getattr(group, scaling))
                yield Finding(f"group {group.name}, {scaling}, float32", getattr(group, f"{scaling}_float32"))
        yield Finding("joint", self.joint)
        yield Finding("joint, float32", self.joint_float32)
        yield Finding("loss gradient", self.loss_gradient)
        yield Finding("examples kept apart", math.inf if self.interaction > 0 else 0.0)
        for node in self.nodes:
            if not node.is_input:
                yield Finding(f"node {node.name} ({node.operation}), forward", node.forward)
            yield Finding(f"node {node.name} ({node.operation}), cotangent", node.cotangent)

    @property
    def worst(self) -> Finding:
        """The claim closest to being false, or furthest beyond; NaN counts as infinite."""
        return max(self.claims(), key=lambda f: math.inf if math.isnan(f.ratio) else f.ratio)

    def violations(self, tolerance: float = TOLERANCE) -> tuple[Finding, ...]:
        """Returns the claims that the attack proves false, the worst first."""
        false = [f for f in self.claims() if not f.ratio <= 1.0 + tolerance]
        return tuple(sorted(false, key=lambda f: -f.ratio))

    def group(self, name: str) -> GroupRatio:
        return next(g for g in self.groups if g.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "groups": [asdict(g) for g in self.groups],
            "nodes": [asdict(n) for n in self.nodes],
            "joint": self.joint,
            "joint_float32": self.joint_float32,
            "loss_gradient": self.loss_gradient,
            "interaction": self.interaction,
            "restarts": self.restarts,
            "steps": self.steps,
            "seed": self.seed,
            "weights": self.weights,
            "worst": asdict(self.worst),
            "violations": [asdict(f) for f in self.violations()],
        }
