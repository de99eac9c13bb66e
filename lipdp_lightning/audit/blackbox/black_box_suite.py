"""All black-box tests of one implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..confidence import shares
from ..findings import Finding
from .adapted import additivity_finding
from .black_box import HyperParameters, Implementation, Optimizer
from .bound_tests import bound_finding, per_example_finding
from .noise_proportion import calibration_finding

# small where Adam would be told the direction of the gradient alone
RATES: dict[Optimizer, float] = {"sgd": 0.1, "adam": 0.01}


def black_box_questions(
    implementation: Implementation, optimizers: Sequence[Optimizer] = ("sgd", "adam")
) -> dict[str, Callable[[float], Finding]]:
    """Bound, per-example and calibration tests for each optimizer, and the additivity of contributions, by name.

    A test of calibration with Adam is left out where gradient and noise both are in proportion to the bound
    (``saturates``): Adam divides any common factor out.
    """
    questions: dict[str, Callable[[float], Finding]] = {}
    for optimizer in optimizers:
        hyper = HyperParameters(1.0, learning_rate=RATES[optimizer], optimizer=optimizer)
        questions[f"bound, {optimizer}"] = lambda alpha, h=hyper: bound_finding(implementation, h)
        questions[f"per example, {optimizer}"] = lambda alpha, h=hyper: per_example_finding(implementation, h)
        if optimizer == "sgd" or not implementation.saturates:
            questions[f"calibration, {optimizer}"] = lambda alpha, h=hyper: calibration_finding(
                implementation, h, alpha
            )
    plain = HyperParameters(0.5, learning_rate=RATES["sgd"])
    questions["additivity"] = lambda alpha: additivity_finding(implementation, plain)
    return questions


def black_box_findings(
    implementation: Implementation, alpha: float, optimizers: Sequence[Optimizer] = ("sgd", "adam")
) -> list[Finding]:
    """The answers; ``alpha`` is shared out among those that can raise a false alarm."""
    questions = black_box_questions(implementation, optimizers)
    share = shares(alpha, sum(name.startswith("calibration") for name in questions))
    return [question(share) for question in questions.values()]
