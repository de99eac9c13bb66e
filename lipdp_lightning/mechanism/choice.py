"""From the plan's name of a scaling to the object."""

from __future__ import annotations

from torch import nn

from ..bounds.certificate import Certificate
from ..privacy.plan import PrivacyPlan
from .clipped import Clipped, Unbounded
from .exact import Exact, ExactLayerwise
from .scaling import BatchMax, Joint, Layerwise, Radii, Radius, Scaling

FIRST_RADIUS = 1.0  # where a tracked radius starts: public, and the tracking forgets it geometrically


def make_scaling(plan: PrivacyPlan, certificate: Certificate, step: int = 0) -> Scaling:
    """The plan's scaling of a step; a first radius is public, and the same for all layers."""
    name = plan.scaling_at(step)
    if plan.clips_examples:
        return Clipped()
    if name == "none":
        return Unbounded()
    if name == "worst_case":
        return Scaling()
    if name == "layerwise":
        return Layerwise(plan.scaling_floor)
    if name == "joint":
        return Joint(plan.scaling_floor)
    if name == "batch_max":
        return BatchMax()
    first = FIRST_RADIUS if plan.radius is None else plan.radius
    scaling: Radii
    if name == "exact":
        scaling = Exact(first, plan.scaling_floor)
    elif name == "exact_layerwise":
        scaling = ExactLayerwise(dict.fromkeys([g.name for g in certificate.groups], first), plan.scaling_floor)
    else:
        assert name == "radius"
        paths = {use.module for group in certificate.groups for use in group.uses if use.scalable}
        scaling = Radius(dict.fromkeys(sorted(paths), first))
    scaling.counting = plan.radius_quantile is not None
    return scaling


def scaling_at(step: int, current: Scaling, plan: PrivacyPlan, certificate: Certificate, model: nn.Module) -> Scaling:
    """``current``, or from the step at which the plan switches the other scaling, attached to the model."""
    if plan.clips_examples or step < plan.first_switched_step or current.name == plan.switch_to:
        return current
    current.detach(model)
    chosen = make_scaling(plan, certificate, step)
    chosen.views = current.views
    chosen.attach(model)
    return chosen
