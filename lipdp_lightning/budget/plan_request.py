"""The constants of a plan from what a user asks for: a target epsilon, and epochs.

No guarantee depends on this room. A plan holds the noise multiplier that was found, and what a run states is the
accountant's epsilon for that.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..accounting.accountants import PlannedReleases
from ..accounting.events import SMALLEST_EPSILON, LedgerEntry, is_positive
from ..bound_text import upper_text
from . import calibrate


class Calibrated(PlannedReleases, Protocol):
    """The part of a plan that its noise is found from."""

    @property
    def sample_rate(self) -> float: ...
    @property
    def radius_noise_multiplier(self) -> float | None: ...
    def preliminary_events(self) -> tuple[LedgerEntry, ...]:
        """Returns the ledger's entries before the first step."""


P = TypeVar("P", bound=Calibrated)


@dataclass(frozen=True)
class PlanRequest:
    """Holds the constants of a plan as a user gives them: the arguments of `PrivacyPlan.create`."""

    dataset_size: int
    expected_batch_size: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    epochs: float | None = None
    steps: int | None = None
    delta: float | None = None

    def plan(self, make: Callable[[Mapping[str, Any]], P], options: Mapping[str, Any], known: Collection[str]) -> P:
        """Returns the plan, with its noise calibrated to epsilon if that is given.

        Args:
            make: returns the plan of complete flat options.
            options: further flat options.
            known: the names of all flat options.

        Raises:
            ValueError: if the request or the options have problems; it lists all of them.
        """
        problems = list(self._problems())
        if unknown := sorted(set(options) - set(known)):
            problems.append(f"unknown options {', '.join(unknown)}.\nHINT: the options are {', '.join(sorted(known))}.")
        fields = {name: value for name, value in options.items() if name in known} | self._constants()
        with warnings.catch_warnings():  # the draft may hold placeholders, which must not cause warnings
            warnings.simplefilter("ignore")
            try:
                draft = make(fields)
            except ValueError as error:
                raise ValueError("\n".join([str(error), *problems])) from None
        if problems:
            raise ValueError("\n".join(problems))
        if self.epsilon is not None:
            fields["noise_multiplier"] = _calibrated_noise(draft, self.epsilon)
        return make(fields)

    def _constants(self) -> dict[str, Any]:
        """Returns the constants of a draft; what is not known yet, or not valid, has a placeholder."""
        size, batch, steps = self.dataset_size, self.expected_batch_size, self.steps
        if self.epochs is not None and is_positive(self.epochs) and size >= 1 and 0 < batch < math.inf:
            steps = calibrate.steps_for_epochs(self.epochs, size, batch)
        return {
            "dataset_size": size,
            "expected_batch_size": batch,
            "steps": 1 if steps is None else steps,
            "delta": (1 / size if size > 1 else 0.5) if self.delta is None else self.delta,
            "noise_multiplier": 1.0 if self.noise_multiplier is None else self.noise_multiplier,
        }

    def _problems(self) -> Iterator[str]:
        epsilon, epochs = self.epsilon, self.epochs
        if (epsilon is None) == (self.noise_multiplier is None):
            yield "epsilon and noise_multiplier: exactly one is needed, the other follows.\nHINT: set epsilon=3."
        if epsilon is not None and not is_positive(epsilon):
            yield f"epsilon {epsilon} is not a positive finite number.\nHINT: set epsilon=3."
        elif epsilon is not None and epsilon < SMALLEST_EPSILON:
            least = upper_text(SMALLEST_EPSILON)
            yield f"epsilon {epsilon} is below {least}: the noise leaves nothing of a model.\nHINT: set epsilon=3."
        if (epochs is None) == (self.steps is None):
            yield "epochs and steps: exactly one is needed, the other follows.\nHINT: set epochs=60."
        if epochs is not None and not is_positive(epochs):
            yield f"epochs {epochs} is not a positive number.\nHINT: set epochs=60."


def _calibrated_noise(plan: Calibrated, epsilon: float) -> float:
    """Returns the gradient's noise multiplier for which the whole run, with votes and statistics, meets epsilon."""
    joined, _ = calibrate.calibrate_noise(
        epsilon, plan.delta, plan.sample_rate, plan.steps, plan.accountant, plan.adjacency,
        plan.max_examples_per_unit, preliminary=plan.preliminary_events(),
    )  # fmt: skip
    votes = plan.radius_noise_multiplier
    if votes is None:
        return joined
    if votes <= joined:
        raise ValueError(
            f"radius_noise_multiplier {votes} alone spends more than epsilon {epsilon}: "
            f"the step as a whole needs {joined:.4g}, and nothing is left for the gradient.\n"
            f"HINT: radius_noise_multiplier of about {5 * joined:.3g} costs the gradient 2 %."
        )
    gradient = 1 / math.sqrt((1 / joined) ** 2 - (1 / votes) ** 2)
    return gradient * (1 + 1e-12)  # so that rounding does not make the joined multiplier too small
