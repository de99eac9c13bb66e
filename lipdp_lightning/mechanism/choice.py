"""Makes the scaling that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..bounds.certificate import Certificate
from ..layers.exact_norms import LARGEST_CANCELLATION
from ..privacy.plan import PrivacyPlan
from .allocation import NoiseBudget
from .exact import ALL, Exact, ExactLayerwise
from .scaling import BatchMax, Joint, Layerwise, Radii, Radius, Scaling

FIRST_RADIUS = 1.0  # where a tracked radius starts: public, and the tracking forgets it geometrically


class Clipped(Scaling):
    """Example gradients arrive clipped (clipping/clipper.py); the certificate holds the radii they are clipped to."""

    name = "clip"
    partial_sums = 2 * LARGEST_CANCELLATION

    def bounds(self, certificate: Certificate) -> dict[str, float]:
        return certificate.sensitivities("worst_case")


class Unbounded(Clipped):
    """Nothing is bounded, for a run without noise."""

    name = "none"
    certified = False


def scaling_of(plan: PrivacyPlan, step: int, certificate: Certificate, views: int = 1) -> Scaling:
    """Returns the scaling that the plan has in force at a step, for a model with this certificate."""
    budget = NoiseBudget.of(plan, views)
    kind = "clip" if plan.clips_examples else plan.scaling_at(step)
    return _MAKERS[kind](plan, budget, certificate)


def _radii(plan: PrivacyPlan, names: list[str]) -> Radii:
    first = FIRST_RADIUS if plan.radius is None else plan.radius
    return Radii(dict.fromkeys(names, first), plan.radius_quantile, plan.radius_noise_multiplier)


def _radius(plan: PrivacyPlan, budget: NoiseBudget, certificate: Certificate) -> Scaling:
    paths = {use.module for group in certificate.groups for use in group.uses if use.scalable}
    return Radius(budget, _radii(plan, sorted(paths)))


def _exact_layerwise(plan: PrivacyPlan, budget: NoiseBudget, certificate: Certificate) -> Scaling:
    names = [group.name for group in certificate.groups]
    return ExactLayerwise(budget, _radii(plan, names), plan.scaling_floor)


_MAKERS: Mapping[str, Callable[[PrivacyPlan, NoiseBudget, Certificate], Scaling]] = {
    "worst_case": lambda plan, budget, certificate: Scaling(budget),
    "layerwise": lambda plan, budget, certificate: Layerwise(budget, plan.scaling_floor),
    "joint": lambda plan, budget, certificate: Joint(budget, plan.scaling_floor),
    "batch_max": lambda plan, budget, certificate: BatchMax(budget),
    "radius": _radius,
    "exact": lambda plan, budget, certificate: Exact(budget, _radii(plan, [ALL]), plan.scaling_floor),
    "exact_layerwise": _exact_layerwise,
    "clip": lambda plan, budget, certificate: Clipped(budget),
    "none": lambda plan, budget, certificate: Unbounded(budget),
}
