"""Makes the scaling that a plan names."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..bounds.certificate import Certificate
from ..layers.contribution import LARGEST_CANCELLATION
from ..layers.scaled import GradientScaler
from ..privacy import plan_parts as parts
from ..privacy.plan import PrivacyPlan
from .allocation import NoiseBudget
from .radii import ALL, Exact, ExactLayerwise, Radii, Radius
from .scaling import SMALLEST, Joint, Layerwise, Scaling, StepNumbers

FIRST_RADIUS = 1.0  # where a tracked radius starts: public, and the tracking forgets it geometrically


class BatchMax(Scaling):
    """c_k = 1 / max_j n_jk over the private batch: thesis Algorithm 8, line 11. NOT private.

    Its factors depend on the whole batch. It is there to reproduce a published mistake.
    """

    name = "batch_max"
    certified = False
    notes_uses = False

    def numbers(self, certificate: Certificate) -> StepNumbers:
        """Adds sigma Delta_k to each layer, as printed, whatever their number."""
        numbers, sigma = super().numbers(certificate), self.budget.noise_multiplier
        return replace(numbers, deviations={name: sigma * value for name, value in numbers.sensitivities.items()})

    def divisor(self, drawn: int) -> float:
        return float(max(1, drawn))

    def scaler_of(self, path: str) -> GradientScaler | None:
        return self._factors

    @staticmethod
    def _factors(norms: Tensor) -> Tensor:
        largest = norms.max().clamp_min(SMALLEST) if norms.numel() else norms.new_ones(())
        return norms.new_ones(norms.shape) / largest


class Clipped(Scaling):
    """Example gradients arrive clipped (clipping/clipper.py); the certificate holds the radii they are clipped to.

    What is clipped is the gradient of all uses, so that no use can escape its radius, and none is compared.
    """

    name = "clip"
    notes_uses = False
    partial_sums = 2 * LARGEST_CANCELLATION

    def bounds(self, certificate: Certificate) -> dict[str, float]:
        return certificate.sensitivities("worst_case")


class Unbounded(Clipped):
    """Nothing is bounded, for a run without noise."""

    name = "none"
    certified = False


def scaling_of(
    plan: PrivacyPlan, step: int, certificate: Certificate, views: int = 1, tensor_cores: bool = False
) -> Scaling:
    """Returns the scaling that the plan has in force at a step, for a model with this certificate.

    Raises:
        ValueError: if the plan leaves the scaling open.
    """
    if not plan.is_settled:
        raise ValueError(
            "scaling 'auto' is not settled: a mechanism needs the scaling that its noise is for. "
            "HINT: use scaling='joint', or scaling='exact' with a radius; PrivateStrategy settles it in set-up."
        )
    budget = NoiseBudget.of(plan, views, tensor_cores)
    measured = NoiseBudget.of(plan, views)  # positions may cancel: their factors are not rounded, on any device
    match plan.influence_at(step):
        case parts.CertifiedBounds(name="layerwise", floor=floor):
            return Layerwise(budget, floor)
        case parts.CertifiedBounds(name="joint", floor=floor):
            return Joint(budget, floor)
        case parts.CertifiedBounds():
            return Scaling(budget)
        case parts.ExampleNorms(name="exact", radius=radius, floor=floor):
            return Exact(measured, _radii(radius, [ALL]), floor)
        case parts.ExampleNorms(name="exact_layerwise", radius=radius, floor=floor):
            return ExactLayerwise(measured, _radii(radius, [group.name for group in certificate.groups]), floor)
        case parts.ExampleNorms(radius=radius):
            paths = {use.module for group in certificate.groups for use in group.uses if use.scalable}
            return Radius(budget, _radii(radius, sorted(paths)))
        case parts.ClippedExamples():
            return Clipped(measured)
        case parts.BatchMaximum():
            return BatchMax(budget)
        case parts.Unlimited():
            return Unbounded(budget)
        case parts.Automatic():
            raise AssertionError("refused above")


def _radii(radius: parts.PublicRadius | parts.TrackedRadius, names: list[str]) -> Radii:
    match radius:
        case parts.PublicRadius(value=value):
            return Radii(dict.fromkeys(names, value))
        case parts.TrackedRadius(quantile=quantile, noise_multiplier=noise):
            return Radii(dict.fromkeys(names, FIRST_RADIUS), quantile, noise)
