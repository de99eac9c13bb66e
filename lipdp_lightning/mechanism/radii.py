"""Scalings that compare each example's norms with public radii, which are declared or follow a private quantile.

``Radius`` goes by the norms of the inputs that a layer has seen. ``Exact`` and ``ExactLayerwise`` go by the exact norm
of each example's gradient. This is what DP-SGD does, at its cost in bias, but computed from layers' inputs and
cotangents (layers/contribution.py), so that no gradient per example is kept. The certificate still takes part: it caps
what is covered by noise wherever it is below the radius, keeps examples apart, and bounds what cannot be measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate, GroupBound
from ..layers.contribution import LARGEST_CANCELLATION, Contribution
from ..layers.scaled import GradientKeeper, GradientScaler, ScaledLayer, hands_over
from ..privacy import plan_parts as parts
from ..privacy.plan import PrivacyPlan
from .allocation import NoiseBudget
from .scaling import SMALLEST, Joint, JointCondition, Layerwise, Scaling, StepNumbers, scaled_layers

ALL = "all layers"  # the one radius of ``exact``
SMALLEST_RADIUS = 1e-9  # far above what underflow takes from a float32 norm


@dataclass
class Radii:
    """Public radii R_k by name: fixed, or tracked by a private quantile of norms, from votes of the examples.

    Attributes:
        values: The present radii; the first ones are public, and the tracking forgets them geometrically.
        quantile: The share of the norms that each radius should exceed; None for fixed radii.
        noise_multiplier: The noise multiplier of the votes, which are part of the step; None for fixed radii.
    """

    values: dict[str, float]
    quantile: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        assert (self.quantile is None) == (self.noise_multiplier is None)


def quantile_step(radius: float, share_below: float, quantile: float, rate: float = 0.2) -> float:
    """Returns a tracked radius after a geometric step towards the quantile, from a noisy share: post-processing."""
    return radius * math.exp(-rate * (min(1.0, max(0.0, share_below)) - quantile))


class Tracked(Scaling):
    """Scalings with radii that votes of the examples may move."""

    def __init__(self, budget: NoiseBudget, radii: Radii, floor: float = 0.0) -> None:
        super().__init__(budget, floor)
        self.radii = radii
        self._votes: dict[str, Tensor] = {}
        self._rows: int | None = None

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._votes = {}

    def begin_pass(self, rows: int) -> None:
        super().begin_pass(rows)
        self._rows = rows

    def votes_of_one(self, certificate: Certificate) -> dict[str, int]:
        """Returns how often one example votes on each radius, by name in sorted order."""
        return dict.fromkeys(sorted(self.radii.values), 1)

    def numbers(self, certificate: Certificate) -> StepNumbers:
        """Adds the votes of one example to the numbers of a step; each vote moves its sum by 1/2."""
        numbers = super().numbers(certificate)
        if self.radii.noise_multiplier is None:
            return numbers
        votes = self.votes_of_one(certificate)
        deviation = self.radii.noise_multiplier * math.hypot(*votes.values()) / 2
        return replace(numbers, votes=votes, vote_deviation=deviation)

    def vote(self, name: str, norms: Tensor) -> None:
        """Adds, for every example, +1/2 if its norm is within the radius and -1/2 if not."""
        if self.radii.quantile is not None:
            norms = norms[: self._rows]
            votes = ((norms <= self.radii.values[name]).sum() - 0.5 * norms.shape[0]).to(torch.float64)
            self._votes[name] = self._votes.get(name, torch.zeros_like(votes)) + votes

    def take_votes(self, device: torch.device) -> Tensor:
        votes, self._votes = self._votes, {}
        if self.radii.quantile is None:
            return super().take_votes(device)
        none = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([votes.get(name, none) for name in sorted(self.radii.values)])

    def learn(self, numbers: StepNumbers, noisy_votes: Tensor) -> None:
        """Moves every radius geometrically towards its quantile, from the noisy share of examples within it."""
        radii, quantile = self.radii.values, self.radii.quantile
        if quantile is not None:
            balances = (noisy_votes / self.budget.expected_batch_size).tolist()
            for name, balance in zip(sorted(radii), balances, strict=True):
                radii[name] = quantile_step(radii[name], balance / numbers.votes[name] + 0.5, quantile)

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
        self.vote(path, norms)
        return norms.clamp_min(max(self.radii.values[path], self._floor)).reciprocal()


# ---- by the exact norms of gradients


class _Measured(Tracked):
    """Keeps what a micro-batch's gradients are made of, and sums them when every factor is known.

    Example i of one micro-batch is row i of every contribution, or ``views`` rows that follow each other, whose mean
    counts. A layer that is used again, or weights that are tied, contribute once for each use; the norms of the uses
    of a group add, which bounds the norm of their sum.
    """

    partial_sums = 2 * LARGEST_CANCELLATION
    sums_in_grad = False  # layers hand their contributions over, which are weighed after the pass

    def __init__(self, budget: NoiseBudget, radii: Radii, floor: float) -> None:
        super().__init__(budget, radii, max(floor, SMALLEST_RADIUS))
        self._views = budget.views
        self._kept: list[tuple[str, ScaledLayer, Contribution]] = []
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._group_of: dict[str, str] = {}

    def attach(self, network: nn.Module) -> None:
        strange = sorted({type(layer).__name__ for _, layer in scaled_layers(network) if not hands_over(layer)})
        if strange:
            raise ValueError(
                f"{', '.join(strange)}: a forward pass of their own may add gradients that nobody measures. "
                f"HINT: scaling 'joint' in place of {self.name!r}, or the layers of lipdp_lightning.layers."
            )
        super().attach(network)

    def keeper_of(self, path: str, layer: ScaledLayer) -> GradientKeeper | None:
        return partial(self._keep, path, layer)

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._kept, self._sums = [], {}
        self._group_of = {use.module: group.name for group in numbers.certificate.groups for use in group.uses}

    def take_sums(self) -> dict[nn.Parameter, Tensor]:
        super().take_sums()
        sums, self._sums = self._sums, {}
        return sums

    def _end_pass(self) -> None:
        super()._end_pass()
        self._settle()

    def _keep(self, path: str, layer: ScaledLayer, contribution: Contribution) -> None:
        self._kept.append((self._group_of[path], layer, contribution))

    @torch.no_grad()
    def _settle(self) -> None:
        """Weighs and sums what the last micro-batch has left."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        assert len({c.rows for _, _, c in kept}) == 1, "rows of one micro-batch are its examples, in every layer"
        norms: dict[str, Tensor] = {}
        for group, _, contribution in kept:
            own = contribution.norms(self._views)
            norms[group] = norms[group] + own if group in norms else own
        factors = {name: f.repeat_interleave(self._views) for name, f in self._factors(norms).items()}
        for group, layer, contribution in kept:
            parameters: tuple[Any, Any] = layer.weight, layer.bias
            for parameter, gradient in zip(parameters, contribution.gradients(factors[group]), strict=True):
                if gradient is not None:
                    self._add(parameter, gradient)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "the gradient of a weight that is computed has nowhere to go"
        total = self._sums.get(parameter)
        self._sums[parameter] = gradient.double() if total is None else total.add_(gradient)

    def _factors(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns c_ik by group, from norms that are at least ||g_ik||; zero where a norm is not finite."""
        raise NotImplementedError

    def _reciprocal(self, name: str, norms: Tensor) -> Tensor:
        # every row votes, and what is summed is divided by the number of views
        self.vote(name, norms.repeat_interleave(self._views))
        return torch.where(torch.isfinite(norms), norms.clamp_min(self._radius(name)).reciprocal(), 0.0)

    def _radius(self, name: str) -> float:
        return max(self.radii.values[name], self._floor)


class Exact(_Measured, JointCondition):
    """One factor per example, c_i = 1 / max(N_i, R) with N_i = sqrt(sum_k (||g_ik|| / tau_k)^2).

    sqrt(sum_k ||c_i g_ik||^2 / tau_k^2) = N_i / max(N_i, R) <= 1, for any public tau_k and R, and N_i <= B, the same
    sum over the certified worst cases, gives B / R where that is less: ``reach`` is the smaller of the two, and
    sigma_k = sigma tau_k reach meets the joint condition as a whole, with no sqrt(K). With equal tau_k this is flat
    clipping to norm R, divided by R; a small R normalises every gradient.
    """

    name = "exact"

    def __init__(self, budget: NoiseBudget, radii: Radii, floor: float) -> None:
        super().__init__(budget, radii, floor)
        self._thresholds: Mapping[str, float] = {}

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._thresholds = numbers.thresholds

    def reference(self, certificate: Certificate) -> dict[str, float]:
        """Returns the same for every group, so that allocation ``global`` or ``equal`` leaves tau_k = 1."""
        moving = [group.name for group in certificate.groups if group.worst_case > 0]
        return {g.name: 1 / math.sqrt(len(moving)) if g.name in moving else 0.0 for g in certificate.groups}

    def reach(self, certificate: Certificate, thresholds: Mapping[str, float]) -> float:
        """Uses that no layer measures are not multiplied by c_i: they come on top, with their worst case."""
        groups = [group for group in certificate.groups if thresholds[group.name] > 0]
        bound = math.hypot(*(_measured(group) / thresholds[group.name] for group in groups))
        rest = math.hypot(*(_unmeasured(group) / thresholds[group.name] for group in groups))
        return min(1.0, bound / self._radius(ALL)) + rest

    def _factors(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # a group of threshold 0 has gradient 0, whatever its factor
        parts = [size.double() / self._thresholds[name] for name, size in norms.items() if self._thresholds[name] > 0]
        total = torch.stack(parts or [torch.zeros_like(n) for n in norms.values()])
        factor = self._reciprocal(ALL, total.square().sum(0).sqrt())
        return dict.fromkeys(norms, factor)


class ExactLayerwise(_Measured):
    """c_ik = 1 / max(||g_ik||, R_k) for each group by itself: Delta_k = min(1, worst case / R_k)."""

    name = "exact_layerwise"

    def bounds(self, certificate: Certificate) -> dict[str, float]:
        return {g.name: min(1.0, _measured(g) / self._radius(g.name)) + _unmeasured(g) for g in certificate.groups}

    def _factors(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._reciprocal(name, size) for name, size in norms.items()}


def _measured(group: GroupBound) -> float:
    return sum(use.cotangent_bound * use.gradient_factor for use in group.uses if use.scalable)


def _unmeasured(group: GroupBound) -> float:
    return sum(use.cotangent_bound * use.gradient_factor for use in group.uses if not use.scalable)


# ---- the scaling that a plan names

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
