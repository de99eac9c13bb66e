"""The factors c_ik that scale each example's gradient, and the sensitivities they leave (guarantee page, 1.4).

A factor is a function of example i and of public numbers, and of no other example: that is what makes it private.
``BatchMax`` breaks this rule, to reproduce thesis Algorithm 8, and is never certified.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate
from ..layers.scaled import ScaledLayer
from .allocation import NoiseBudget

SMALLEST = 1e-12  # keeps an all-zero example's factor finite; its gradient is zero


@dataclass(frozen=True)
class StepNumbers:
    """The public numbers of one step: functions of the weights, the plan and past releases.

    Attributes:
        certificate: the certificate of the weights at which the step's gradients are computed.
        sensitivities: the most by which one example changes each group's sum, with the margin for float32 sums.
        deviations: the standard deviation of the noise on each group's sum.
        thresholds: tau_k of every group, for scalings that meet one condition for all groups together.
        votes: the number of votes of one example on each quantity that a private quantile tracks.
        vote_deviation: the standard deviation of the noise on the sums of votes.
    """

    certificate: Certificate
    sensitivities: Mapping[str, float]
    deviations: Mapping[str, float]
    thresholds: Mapping[str, float] = field(default_factory=dict)
    votes: Mapping[str, int] = field(default_factory=dict)
    vote_deviation: float = 0.0


def scaled_layers(network: nn.Module) -> Iterator[tuple[str, ScaledLayer]]:
    """Yields path and module of every layer that can measure and scale its gradient by example."""
    return ((path, m) for path, m in network.named_modules() if isinstance(m, ScaledLayer))


class LayerUses:
    """The layers that a forward pass has used with gradients, in order.

    No noise covers a use for which the certificate has no term, and if a use is missing, the later ones would be paired
    with terms of others. Hence both must agree exactly, or nothing is released.
    """

    def __init__(self) -> None:
        self._expected: list[str] = []
        self.seen: list[str] = []
        self._passed = False  # the micro-batch has had its forward pass

    def begin(self, certificate: Certificate) -> None:
        """Expects the uses of a step's certificate, in the order of its graph."""
        order = {node.name: place for place, node in enumerate(certificate.nodes)}
        uses = [use for group in certificate.groups for use in group.uses if use.scalable]
        self._expected = [use.module for use in sorted(uses, key=lambda use: order.get(use.node, 0))]
        self.seen, self._passed = [], False

    def note(self, path: str) -> None:
        """Notes that a layer is used."""
        self.seen.append(path)

    def check(self) -> None:
        """Raises ValueError if the uses since the last check are not those of one forward pass, and forgets them."""
        seen, self.seen, self._passed = self.seen, [], True
        if seen != self._expected:
            raise self.refusal(seen)

    def settle(self) -> None:
        """Ends a micro-batch; raises ValueError if it has used layers in more than its one forward pass."""
        if self.seen and self._passed:
            raise self.refusal([*self._expected, *self.seen])
        if self.seen:
            self.check()
        self._passed = False

    def refusal(self, seen: list[str]) -> ValueError:
        """Returns the error for uses that the certificate does not have."""
        return ValueError(
            f"a forward pass with gradients used the layers {_listed(seen)}, and the certificate bounds the uses "
            f"{_listed(self._expected)}, in this order: the bounds would belong to other gradients than those that "
            "are released. HINT: one forward pass of the certified network for each micro-batch, without "
            "torch.no_grad() around trained layers and without checkpointing; look at it under torch.no_grad()."
        )


def _listed(paths: list[str]) -> str:
    shown = ", ".join(path or "the network" for path in paths[:12]) or "(none)"
    return shown + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")


class Scaling:
    """Worst case, c = 1: sensitivities are l_k n_k from the forward bounds (papers 000 and 001).

    The base of all scalings. During a step, the mechanism calls ``begin`` once with the step's public numbers,
    ``begin_pass`` before each micro-batch, and ``take_sums`` and ``take_votes`` at its end. Each of these raises
    ValueError if layers were used otherwise than the certificate bounds.
    """

    name = "worst_case"
    certified = True
    notes_uses = True  # whether layers report their uses, which are compared with the certificate's
    joint = False  # whether the groups meet one condition together, and not each its own
    partial_sums = 0.0  # how far sums over positions may exceed an example's contribution, in sensitivities

    def __init__(self, budget: NoiseBudget) -> None:
        self.budget, self.uses = budget, LayerUses()
        self._attached: list[tuple[ScaledLayer, tuple[object, ...]]] = []

    # ---- public numbers

    def bounds(self, certificate: Certificate) -> dict[str, float]:
        """Returns the most by which one example changes the sum of each group, in exact arithmetic."""
        return certificate.sensitivities(self.name)

    def numbers(self, certificate: Certificate) -> StepNumbers:
        """Returns the public numbers of a step at the weights of this certificate."""
        margin = self.budget.margin(self.partial_sums)
        sensitivities = {name: value * margin for name, value in self.bounds(certificate).items()}
        return StepNumbers(certificate, sensitivities, self.budget.deviations(sensitivities, certificate.sizes()))

    def divisor(self, drawn: int) -> float:
        """Returns what the released sum is divided by: the declared batch size, whatever was drawn."""
        return float(self.budget.expected_batch_size)

    # ---- a step

    def attach(self, network: nn.Module) -> None:
        """Lets every scaled layer of the network report to this scaling."""
        layers = dict(scaled_layers(network))
        for path, layer in layers.items():
            self._attach_to(path, layer)
            layer.tensor_cores = self.budget.tensor_cores
        self._attached = [(layer, layer.reports()) for layer in layers.values()]

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        """Lets one layer report; here, that it is used."""
        if self.notes_uses:
            layer.report_to(counter=partial(self.uses.note, path))

    def detach(self, network: nn.Module) -> None:
        """Ends what ``attach`` began."""
        for _, layer in scaled_layers(network):
            layer.report_to()
            layer.tensor_cores = False
        self._attached = []

    def begin(self, numbers: StepNumbers) -> None:
        """Starts a step; what passes outside a step have left is forgotten."""
        self.uses.begin(numbers.certificate)

    def begin_pass(self, rows: int) -> None:
        """Starts a micro-batch whose first ``rows`` rows are examples; further rows are empty."""
        self._end_pass()

    def example_factor(self, rows: int, device: torch.device) -> Tensor | None:
        """Returns a factor for each row's loss after its forward pass, or None where losses are left alone."""
        self._check_uses()
        return None

    def take_sums(self) -> dict[nn.Parameter, Tensor]:
        """Returns the step's sums that are not in ``grad``; they are handed over once."""
        self._end_pass()
        return {}

    def _check_uses(self) -> None:
        if self.notes_uses and self._attached:
            self.uses.check()

    def _end_pass(self) -> None:
        """Ends a micro-batch: before the next forward pass, and before the release."""
        if any([layer.reports() != given for layer, given in self._attached]):
            raise ValueError(
                "a layer's gradient_scaler or gradient_keeper was replaced after the mechanism had set it: the "
                "gradients are not scaled as the noise assumes. HINT: leave them to the mechanism."
            )
        if self._attached:
            self.uses.settle()

    # ---- what is tracked from step to step

    def take_votes(self, device: torch.device) -> Tensor:
        """Returns the sums of this step's votes, in float64, in the order of ``StepNumbers.votes``."""
        return torch.zeros(0, dtype=torch.float64, device=device)

    def learn(self, numbers: StepNumbers, noisy_votes: Tensor) -> None:
        """Updates what is tracked from the released votes; post-processing."""

    def state(self) -> dict[str, float]:
        """Returns what a resume needs: released values, by name."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continues from a saved ``state``."""


class Layerwise(Scaling):
    """c_ik = 1 / max(n_ik, floor): ||c_ik g_ik|| <= l_k, whatever the floor. Thesis Algorithm 8 made sound."""

    name = "layerwise"

    def __init__(self, budget: NoiseBudget, floor: float = 0.0) -> None:
        super().__init__(budget)
        self._floor = max(floor, SMALLEST)

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.report_to(scaler=partial(self._factors, path))

    def _factors(self, path: str, norms: Tensor) -> Tensor:
        self.uses.note(path)
        return norms.clamp_min(self._floor).reciprocal()


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

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.report_to(scaler=self._factors)

    @staticmethod
    def _factors(norms: Tensor) -> Tensor:
        largest = norms.max().clamp_min(SMALLEST) if norms.numel() else norms.new_ones(())
        return norms.new_ones(norms.shape) / largest


class JointCondition(Scaling):
    """Scalings that meet one condition for all groups: sqrt(sum_k ||c_i g_ik||^2 / tau_k^2) <= reach."""

    joint = True

    def reference(self, certificate: Certificate) -> dict[str, float]:
        """Returns what the thresholds tau_k are allocated from; a group that cannot move has 0."""
        return certificate.sensitivities("worst_case")

    def reach(self, certificate: Certificate, thresholds: Mapping[str, float]) -> float:
        """Returns the bound of the condition's left side, at most 1 for what is measured by example."""
        return 1.0

    def numbers(self, certificate: Certificate) -> StepNumbers:
        """Calibrates sigma_k = sigma tau_k reach, which meets the condition as a whole, with no sqrt(K)."""
        thresholds = self.budget.thresholds(self.reference(certificate), certificate.sizes())
        reach = self.reach(certificate, thresholds) * self.budget.margin(self.partial_sums)
        sensitivities = {name: value * reach for name, value in thresholds.items()}
        deviations = {name: self.budget.noise_multiplier * value for name, value in sensitivities.items()}
        return StepNumbers(certificate, sensitivities, deviations, thresholds)


class Joint(JointCondition):
    """One factor per example, c_i = 1 / sqrt(sum_k (l_k n_ik / tau_k)^2), on the whole loss.

    sum_k ||c_i g_ik||^2 / tau_k^2 <= 1 for every example: certified as a whole, and the gradient keeps its direction.
    Uses of one group add before they are squared. A use that cannot measure n_ik enters with its worst case.
    """

    name = "joint"

    def __init__(self, budget: NoiseBudget, floor: float = 0.0) -> None:
        super().__init__(budget)
        self._floor = max(floor, SMALLEST)
        self._terms: dict[str, list[tuple[int, float]]] = {}  # group and factor of every use of a layer, in order
        self._constants: list[float] = []  # of every group, what its unmeasured uses contribute
        self._seen: list[tuple[str, Tensor]] = []  # layers and norms of this pass, in order

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.report_to(scaler=partial(self._record, path))

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._terms, self._constants, self._seen = {}, [], []
        for index, group in enumerate(numbers.certificate.groups):
            threshold = numbers.thresholds[group.name]
            self._constants.append(0.0)
            for use in group.uses:
                weight = use.cotangent_bound / threshold if threshold > 0 else 0.0
                if use.scalable:
                    self._terms.setdefault(use.module, []).append((index, weight))
                else:
                    self._constants[index] += weight * use.gradient_factor

    def begin_pass(self, rows: int) -> None:
        super().begin_pass(rows)
        self._seen = []

    def _record(self, path: str, norms: Tensor) -> None:
        self.uses.note(path)
        self._seen.append((path, norms))

    def example_factor(self, rows: int, device: torch.device) -> Tensor | None:
        # numbers of the step change every time: compiled into a graph, each step would need another one
        return (_apart if torch.compiler.is_compiling() else _now)(self, rows, device)

    def _checked_factors(self, rows: int, device: torch.device) -> Tensor:
        self._check_uses()
        return self._factors(rows, device)

    def _factors(self, rows: int, device: torch.device) -> Tensor:
        totals: list[Tensor | float] = list(self._constants)
        for index, size in self._uses(rows):
            totals[index] = totals[index] + size
        return self._combined(totals, rows, device)

    def _uses(self, rows: int) -> list[tuple[int, Tensor]]:
        """Returns, for every measured use of this pass, its group and l_u n_iu / tau_k of every row."""
        seen, self._seen = self._seen, []
        if any(norms.shape != (rows,) for _, norms in seen):
            raise ValueError(
                "a layer was given another number of rows than the batch has examples, and their norms cannot be told "
                "apart. HINT: keep the batch as the first dimension of every tensor."
            )
        terms = {path: iter(found) for path, found in self._terms.items()}
        found = []
        for path, norms in seen:
            index, weight = next(terms[path])  # as many as the certificate has: the uses were compared
            found.append((index, norms * weight))
        return found

    def _combined(self, totals: Sequence[Tensor | float], rows: int, device: torch.device) -> Tensor:
        """Returns the factor of every row from sum_u l_u n_iu / tau_k of every group."""
        squares = torch.zeros(rows, device=device)
        for total in totals:
            squares = squares + total * total
        return squares.sqrt().clamp_min(self._floor).reciprocal()


def _now(scaling: Joint, rows: int, device: torch.device) -> Tensor:
    return scaling._checked_factors(rows, device)


_apart: Callable[..., Tensor] = torch.compiler.disable(_now)


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

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.report_to(scaler=partial(self._factors, path))

    def _factors(self, path: str, norms: Tensor) -> Tensor:
        self.uses.note(path)
        self.radii.vote(path, norms)
        return norms.clamp_min(max(self.radii.values[path], SMALLEST)).reciprocal()
