"""Scalings with public radii, which are declared or follow a private quantile of the examples' norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..bounds.certificate import Certificate
from ..layers.scaled import GradientScaler
from .allocation import NoiseBudget
from .scaling import SMALLEST, Scaling, StepNumbers


class Radii:
    """Public radii R_k by name: fixed, or tracked by a private quantile of norms, from votes of the examples.

    Args:
        radii: the first radii; public, and the tracking forgets them geometrically.
        quantile: what share of the norms each radius should exceed; None for fixed radii.
        noise_multiplier: of the query, which joins the step.
    """

    def __init__(
        self, radii: Mapping[str, float], quantile: float | None = None, noise_multiplier: float | None = None
    ) -> None:
        assert (quantile is None) == (noise_multiplier is None)
        self.values, self.quantile, self._noise_multiplier = dict(radii), quantile, noise_multiplier
        self._sums: dict[str, Tensor] = {}
        self._rows: int | None = None

    def with_votes(self, numbers: StepNumbers, votes: Mapping[str, int]) -> StepNumbers:
        """Returns the numbers of a step in which one example votes so often; every vote moves its sum by 1/2."""
        if self._noise_multiplier is None:
            return numbers
        deviation = self._noise_multiplier * math.hypot(*votes.values()) / 2
        return replace(numbers, votes=dict(votes), vote_deviation=deviation)

    def begin(self) -> None:
        self._sums = {}

    def begin_pass(self, rows: int) -> None:
        self._rows = rows

    def vote(self, name: str, norms: Tensor) -> None:
        """Adds, for every example, +1/2 if its norm is within the radius and -1/2 if not."""
        if self.quantile is not None:
            norms = norms[: self._rows]
            votes = ((norms <= self.values[name]).sum() - 0.5 * norms.shape[0]).to(torch.float64)
            self._sums[name] = self._sums.get(name, torch.zeros_like(votes)) + votes

    def take(self, device: torch.device) -> Tensor:
        sums, self._sums = self._sums, {}
        if self.quantile is None:
            return torch.zeros(0, dtype=torch.float64, device=device)
        none = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([sums.get(name, none) for name in sorted(self.values)])

    def learn(self, numbers: StepNumbers, noisy: Tensor, expected_batch_size: float) -> None:
        """Moves every radius geometrically towards its quantile, from the noisy share of examples within it."""
        if self.quantile is None:
            return
        for name, balance in zip(sorted(self.values), (noisy / expected_batch_size).tolist(), strict=True):
            share = balance / numbers.votes[name] + 0.5
            self.values[name] = quantile_step(self.values[name], share, self.quantile)


def quantile_step(radius: float, share_below: float, quantile: float, rate: float = 0.2) -> float:
    """Returns a tracked radius after a geometric step towards the quantile, from a noisy share: post-processing."""
    return radius * math.exp(-rate * (min(1.0, max(0.0, share_below)) - quantile))


class Tracked(Scaling):
    """Scalings with radii that votes of the examples may move."""

    def __init__(self, budget: NoiseBudget, radii: Radii) -> None:
        super().__init__(budget)
        self.radii = radii

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self.radii.begin()

    def begin_pass(self, rows: int) -> None:
        super().begin_pass(rows)
        self.radii.begin_pass(rows)

    def votes_of_one(self, certificate: Certificate) -> dict[str, int]:
        """Returns how often one example votes on each radius, by name in sorted order."""
        return dict.fromkeys(sorted(self.radii.values), 1)

    def numbers(self, certificate: Certificate) -> StepNumbers:
        return self.radii.with_votes(super().numbers(certificate), self.votes_of_one(certificate))

    def take_votes(self, device: torch.device) -> Tensor:
        return self.radii.take(device)

    def learn(self, numbers: StepNumbers, noisy_votes: Tensor) -> None:
        self.radii.learn(numbers, noisy_votes, self.budget.expected_batch_size)

    def state(self) -> dict[str, float]:
        return dict(self.radii.values)

    def load_state(self, state: Mapping[str, float]) -> None:
        self.radii.values.update(state)


class Radius(Tracked):
    """c_ik = min(1, R_k / n_ik) / R_k = 1 / max(n_ik, R_k), for layer k with radius R_k."""

    name = "radius"

    def votes_of_one(self, certificate: Certificate) -> dict[str, int]:
        """Returns one vote for every use of a layer."""
        uses = Counter(use.module for group in certificate.groups for use in group.uses if use.scalable)
        return {path: uses[path] for path in sorted(self.radii.values)}

    def scaler_of(self, path: str) -> GradientScaler | None:
        return partial(self._factors, path)

    def _factors(self, path: str, norms: Tensor) -> Tensor:
        self.radii.vote(path, norms)
        return norms.clamp_min(max(self.radii.values[path], SMALLEST)).reciprocal()
