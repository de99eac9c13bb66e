"""Where the guarantee rests on per-example clipping, or where there is none."""

from __future__ import annotations

from ..bounds.certificate import Certificate
from ..layers.exact_norms import LARGEST_CANCELLATION
from .scaling import Scaling


class Clipped(Scaling):
    """Example gradients arrive clipped (baselines/clipper.py); the certificate holds the radii they are clipped to."""

    name = "clip"
    partial_sums = 2 * LARGEST_CANCELLATION

    def sensitivities(self, certificate: Certificate) -> dict[str, float]:
        return certificate.sensitivities("worst_case")


class Unbounded(Clipped):
    """No bound on anything, for a run without noise."""

    name = "none"
    certified = False
