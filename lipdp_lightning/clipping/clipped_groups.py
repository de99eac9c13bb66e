"""Replaces a certificate where per-example clipping bounds each gradient: groups and their clip radii."""

from __future__ import annotations

import math
from typing import Any, SupportsBytes

from torch import Tensor, nn

from ..bounds.certificate import Certificate, GroupBound, UseBound
from ..bounds.certifier import Certifier
from ..privacy.plan import PrivacyPlan
from ..privacy.plan_parts import ClippedExamples

ALL_LAYERS = "all layers"


class ClippedGroups(Certifier):
    """Certifies Delta_k as the radius that example gradients are clipped to, without the norm of any weight.

    With flat and ghost there is one group of radius R. With per_layer there is one group for each layer, of radius R /
    sqrt(K), so that the whole gradient's radius is R again. Without clipping and noise nothing is bounded, and Delta is
    0.

    The network is still traced, and layers that mix examples are refused, since no gradient would belong to one
    example.
    """

    def __init__(self, plan: PrivacyPlan, network: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(network, *arguments, **options)
        self._plan = plan

    def certify(self, state: SupportsBytes = b"") -> Certificate:
        self.follow()
        self.norms.begin(state)
        groups = tuple(self._group(name, members) for name, members in clip_groups(self._model, self._plan.scaling))
        return Certificate((), groups, math.inf, self.input_bound, "")

    def _group(self, name: str, members: dict[str, Tensor]) -> GroupBound:
        radius = group_radius(self._model, self._plan)
        use = UseBound("", "", radius, 1.0, self.input_bound, math.inf, False)
        return GroupBound(name, tuple(members), sum(p.numel() for p in members.values()), (use,))


def clip_groups(network: nn.Module, scaling: str) -> list[tuple[str, dict[str, Tensor]]]:
    """Returns name and trained parameters of what is clipped together: all, or each layer (weight and bias)."""
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if scaling not in ("clip_per_layer", "none"):
        return [(ALL_LAYERS, dict(trained))]
    layers: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trained.items():
        layers.setdefault(name.rpartition(".")[0] or name, {})[name] = parameter
    return list(layers.items())


def group_radius(network: nn.Module, plan: PrivacyPlan) -> float:
    """Returns the radius of each group; K groups of R / sqrt(K) bound the whole gradient by R."""
    match plan.influence:
        case ClippedExamples(norm=norm):
            return norm / math.sqrt(len(clip_groups(network, plan.scaling)))
    return 0.0
