"""The scaling of thesis Algorithm 8, whose factors depend on the whole batch: it is there to reproduce a mistake."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..bounds.certificate import Certificate
from ..layers.scaled import GradientScaler
from .scaling import SMALLEST, Scaling, StepNumbers


class BatchMax(Scaling):
    """c_k = 1 / max_j n_jk over the private batch: thesis Algorithm 8, line 11. NOT private."""

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
