"""Applies a plan's projections after a step, and has the norms of what they leave evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from ..bounds.certificate import Certificate
from ..norm_balls import Clip, resolve_projection, standardize, standardized_layers, together
from ..norms.follow import Follower
from ..privacy.plan import PrivacyPlan
from ..privacy.plan_parts import Unsettled


class Projector:
    """Applies the plan's projections to the weights that a certifier asked a follower about.

    After ``project_``, every projected layer's certified norm is at most its maximum, but for rounding. The certificate
    taken next does not rely on that: whatever a projection leaves, its norm is evaluated, or followed from the change.
    A layer's own norm does not enter its own bound, so layers may be left free.
    """

    def __init__(
        self, follower: Follower, plan: PrivacyPlan, certificate: Certificate, parameters: Mapping[str, Tensor]
    ) -> None:
        """Takes a certificate of the follower's walk, which told it the trained weights with an operator norm."""
        self._follower = follower
        trained = [name for group in certificate.groups for name in group.parameters]
        self._names = {n.rpartition(".")[0] or n: n for n in trained if follower.operators_of(n)}
        constraint = plan.constraint
        balls = constraint.balls
        assert not isinstance(balls, Unsettled), "the plan's scaling is not settled"
        kind, limit = ("clip", None) if balls is None else (balls.projection, balls.max_norm)
        radii = dict(limit) if isinstance(limit, tuple) else limit
        self._rules = resolve_projection(list(self._names), kind, radii, constraint.free_layers)
        ruled = {self._names[layer]: rule for layer, rule in self._rules.items() if rule is not None}
        self._clipped = {name: rule.max_norm for name, rule in ruled.items() if isinstance(rule, Clip)}
        self._changed = {name: rule for name, rule in ruled.items() if name not in self._clipped}
        free = frozenset(n for n in self._names if any(fnmatchcase(n, pattern) for pattern in constraint.free_layers))
        weights = {layer: parameters[name] for layer, name in self._names.items()}
        self._standardized = standardized_layers(weights, constraint.standardize, free)
        self._with_variance = constraint.standardize == "mean_and_variance"

    def project_(self) -> None:
        """Puts every layer back into its norm ball; the follower then holds the bounds of what is stored."""
        for weight in self._standardized.values():
            standardize(weight, self._with_variance)
        for name, rule in self._changed.items():
            rule.apply_(self._follower.weight_of(name), together(self._follower.operators_of(name)))
        self._follower.renew(list(self._changed), cheap_too=True)
        self._follower.measure()
        self._follower.clip_(self._clipped)

    def norms(self) -> dict[str, tuple[float, float | None]]:
        """Returns the certified norm and the maximum (None: free) of every layer, for reports."""
        self._follower.measure()
        return {
            layer: (self._follower.bound(name), None if (rule := self._rules[layer]) is None else rule.max_norm)
            for layer, name in self._names.items()
        }
