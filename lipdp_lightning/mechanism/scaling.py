"""The factors c_ik that scale each example's gradient, and the sensitivities they leave (guarantee page, 1.4).

A factor is a function of example i and of public numbers, and of no other example: that is what makes it private.
All other scalings are in radii.py. One of them breaks this rule, and is never certified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate, UseBound
from ..layers.scaled import GradientKeeper, GradientScaler, ScaledLayer, reports_of
from .allocation import NoiseBudget
from .step_errors import other_uses, replaced_reports

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


def scalable_uses(certificate: Certificate) -> list[tuple[int, UseBound]]:
    """Returns each use of a layer that reports it, with the number of its group, in the order of the graph."""
    order = {node.name: place for place, node in enumerate(certificate.nodes)}
    uses = [(index, use) for index, group in enumerate(certificate.groups) for use in group.uses if use.scalable]
    return sorted(uses, key=lambda numbered: order.get(numbered[1].node, 0))


class Scaling:
    """Worst case, c = 1: sensitivities are l_k n_k from the forward bounds (papers 000 and 001).

    The base of all scalings. During a step, the mechanism calls ``begin`` once with the step's public numbers,
    ``begin_pass`` before each micro-batch, and ``take_sums`` and ``take_votes`` at its end. No noise covers a use of a
    layer that the certificate does not bound, so each of these raises ValueError if the layers that were used with
    gradients are not those of the certificate, in its order and number.
    """

    name = "worst_case"
    certified = True
    notes_uses = True  # whether layers report their uses, which are compared with the certificate's
    sums_in_grad = True  # whether the backward pass leaves the whole sum in ``grad``
    joint = False  # whether the groups meet one condition together, and not each its own
    partial_sums = 0.0  # how far sums over positions may exceed an example's contribution, in sensitivities

    def __init__(self, budget: NoiseBudget, floor: float = 0.0) -> None:
        self.budget, self._floor = budget, max(floor, SMALLEST)  # no factor divides by less than the floor
        self._attached: list[tuple[ScaledLayer, tuple[object, ...]]] = []
        self._bounded: list[tuple[int, UseBound]] = []  # the step's uses of layers, each with its group
        self._expected: list[str] = []  # the paths of their layers
        self._used: list[str] = []  # layers append their paths, in the order of their uses
        self._passed = False  # the micro-batch has had its forward pass

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
            counter = partial(self._used.append, path) if self.notes_uses else None
            layer.report_to(self.scaler_of(path), self.keeper_of(path, layer), counter)
            layer.tensor_cores = self.budget.tensor_cores
        self._attached = [(layer, reports_of(layer)) for layer in layers.values()]

    def scaler_of(self, path: str) -> GradientScaler | None:
        """Returns what a layer gives its norms n_ik to, and has its factors c_ik from; None leaves its gradient."""
        return None

    def keeper_of(self, path: str, layer: ScaledLayer) -> GradientKeeper | None:
        """Returns what a layer hands its gradient over to, in place of adding it to ``grad``."""
        return None

    def detach(self, network: nn.Module) -> None:
        """Ends what ``attach`` began."""
        for _, layer in scaled_layers(network):
            layer.report_to()
            layer.tensor_cores = False
        self._attached = []

    def begin(self, numbers: StepNumbers) -> None:
        """Starts a step; what passes outside a step have left is forgotten."""
        self._bounded = scalable_uses(numbers.certificate)
        self._expected = [use.module for _, use in self._bounded]
        self._used.clear()
        self._passed = False

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
        """Raises ValueError if the uses since the last check are not those of one forward pass, and forgets them."""
        used = self._used.copy()
        self._used.clear()
        self._passed = True
        if used != self._expected and self.notes_uses:
            raise other_uses(used, self._expected)

    def _end_pass(self) -> None:
        """Ends a micro-batch: before the next forward pass, and before the release."""
        if any([reports_of(layer) != given for layer, given in self._attached]):
            raise replaced_reports()
        if self._used and self._passed:
            raise other_uses([*self._expected, *self._used], self._expected)
        if self._used:
            self._check_uses()
        self._passed = False

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

    def scaler_of(self, path: str) -> GradientScaler | None:
        return self._factors

    def _factors(self, norms: Tensor) -> Tensor:
        return norms.clamp_min(self._floor).reciprocal()


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
        reach = self.budget.margin(self.partial_sums) * self.reach(certificate, thresholds)
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
        super().__init__(budget, floor)
        self._terms: list[tuple[int, float]] = []  # group and factor l_u / tau_k of every use of a layer, in order
        self._constants: list[float] = []  # of every group, what its unmeasured uses contribute
        self._norms: list[Tensor] = []  # layers append their norms, in the order of their uses

    def scaler_of(self, path: str) -> GradientScaler | None:
        return self._norms.append

    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._norms.clear()
        groups = numbers.certificate.groups
        thresholds = [numbers.thresholds[group.name] for group in groups]
        self._terms = [(index, _over(use.cotangent_bound, thresholds[index])) for index, use in self._bounded]
        self._constants = [
            sum((_over(u.cotangent_bound, tau) * u.gradient_factor for u in group.uses if not u.scalable), start=0.0)
            for group, tau in zip(groups, thresholds, strict=True)
        ]

    def begin_pass(self, rows: int) -> None:
        super().begin_pass(rows)
        self._norms.clear()

    def example_factor(self, rows: int, device: torch.device) -> Tensor | None:
        # numbers of the step change every time: compiled into a graph, each step would need another one
        return (_apart if torch.compiler.is_compiling() else _now)(self, rows, device)

    def _factors(self, rows: int, device: torch.device) -> Tensor:
        """Returns the factor of every row, by as many operations for many layers as for one."""
        norms = self._measured(rows)
        sizes = torch._foreach_mul(norms, [weight for _, weight in self._terms]) if norms else []
        totals: dict[int, Tensor] = {}
        for (index, _), size in zip(self._terms, sizes, strict=True):
            totals[index] = totals[index] + size if index in totals else size
        rest = 0.0  # of groups that have no measured use
        for index, constant in enumerate(self._constants):
            if index not in totals:
                rest = math.hypot(rest, constant)
            elif constant:
                totals[index] = totals[index] + constant
        parts = [*totals.values(), *([torch.full((rows,), rest, device=device)] if rest or not totals else [])]
        return torch.linalg.vector_norm(torch.stack(parts), dim=0).clamp_min(self._floor).reciprocal()

    def _measured(self, rows: int) -> list[Tensor]:
        """Returns the norms n_iu of every measured use of this pass, in the order of the step's terms."""
        norms = self._norms.copy()
        self._norms.clear()
        self._check_uses()  # then each use has a norm, and the certificate's terms are theirs, in this order
        if any([of_use.shape != (rows,) for of_use in norms]):
            raise ValueError(
                "a layer was given another number of rows than the batch has examples, and their norms cannot be told "
                "apart. HINT: keep the batch as the first dimension of every tensor."
            )
        return norms


def _over(bound: float, threshold: float) -> float:
    return bound / threshold if threshold > 0 else 0.0  # a group of threshold 0 cannot move


def _now(scaling: Joint, rows: int, device: torch.device) -> Tensor:
    return scaling._factors(rows, device)


_apart: Callable[..., Tensor] = torch.compiler.disable(_now)
