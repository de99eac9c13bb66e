"""Projection of every layer of a model after each step, on certified norms."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from ..bounds.certificate import Certificate
from ..bounds.certifier import Certifier
from ..bounds.tracked import TrackedNorms
from ..privacy.plan import PrivacyPlan
from .projection import ProjectionRule, resolve_projection
from .standardization import standardize, standardized_layers


class Projector:
    """Applies the plan's projection rules to the weights that a certifier's norm source tracks.

    Guarantee: after ``project_`` every projected layer's certified norm is at most its maximum, and
    the certificate taken next is that of the projected weights. A layer's own norm does not enter its own
    bound, so layers may be left free.
    """

    def __init__(
        self, certifier: Certifier, plan: PrivacyPlan, certificate: Certificate, parameters: Mapping[str, Tensor]
    ) -> None:
        assert isinstance(certifier.norms, TrackedNorms), "training needs a Certifier with TrackedNorms"
        certifier.certify()  # the second walk starts the tracker
        self._norms = certifier.norms
        self._kind = plan.projection
        layers = self._layers(certificate, parameters)
        self._entries = {name: entry for name, (entry, _) in layers.items()}
        self._groups = {name: groups for name, (_, groups) in layers.items()}
        self._rules: dict[str, ProjectionRule | None] = dict.fromkeys(self._entries)
        if plan.max_norm is not None and plan.projection != "none":
            limit = plan.max_norm if isinstance(plan.max_norm, int | float) else dict(plan.max_norm)
            self._rules = resolve_projection(list(self._entries), plan.projection, limit, plan.free_layers)
        free = frozenset(n for n in self._entries if any(fnmatchcase(n, pattern) for pattern in plan.free_layers))
        assert self._norms.tracker is not None
        weights = {name: self._norms.tracker.entries[entry].weight for name, entry in self._entries.items()}
        self._standardized = standardized_layers(weights, plan.standardize, free)
        self._with_variance = plan.standardize == "mean_and_variance"

    def _layers(self, certificate: Certificate, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Layer name -> (tracker entry, groups) of every trained weight with an operator norm."""
        found = {}
        for group in certificate.groups:
            for name in group.parameters:
                entries = self._norms.entries_of(parameters[name])
                if entries:
                    layer = name.rpartition(".")[0] or name
                    found[layer] = (entries[0], self._norms.weight_groups(entries[0]))
        return found

    def project_(self) -> list[float] | None:
        """Bounds on all norms of the tracker afterwards, where they come at no further cost."""
        tracker = self._norms.tracker
        assert tracker is not None
        for weight in self._standardized.values():
            standardize(weight, self._with_variance)
        if self._kind == "clip":
            limits: list[float | None] = [None] * len(tracker.entries)
            for layer, rule in self._rules.items():
                limits[self._entries[layer]] = None if rule is None else rule.max_norm
            return tracker.clip(limits)
        for layer, rule in self._rules.items():
            if rule is not None:
                entry = tracker.entries[self._entries[layer]]
                norm = rule.apply(entry.weight, entry.exact_norm, kappa=entry.kappa, groups=self._groups[layer])
                tracker.certified(self._entries[layer], norm)
        return None

    def projected(self, digest: bytes, bounds: list[float]) -> None:
        self._norms.projected(digest, bounds)

    def expect(self, digest: bytes) -> None:
        """The next certificate is of the weights that the digest names: those of the last projection, or others."""
        self._norms.expect(digest)

    def norms(self) -> dict[str, tuple[float, float | None]]:
        """Certified norm and maximum (None: free) of every layer, for reports."""
        tracker = self._norms.tracker
        assert tracker is not None
        bounds = tracker.update()
        return {
            layer: (bounds[entry], None if (rule := self._rules[layer]) is None else rule.max_norm)
            for layer, entry in self._entries.items()
        }
