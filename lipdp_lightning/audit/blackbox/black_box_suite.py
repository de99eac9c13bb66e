"""Collects all black-box tests of one implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..confidence import shares
from ..findings import Finding
from .adapted import additivity_finding
from .black_box import HyperParameters, Implementation, Optimizer
from .bound_tests import bound_finding, per_example_finding
from .noise_proportion import calibration_finding

# Adam sees little more than the direction of the gradient, so its rate is small
RATES: dict[Optimizer, float] = {"sgd": 0.1, "adam": 0.01}


def black_box_questions(
    implementation: Implementation, optimizers: Sequence[Optimizer] = ("sgd", "adam")
) -> dict[str, Callable[[float], Finding]]:
    """Returns bound, per-example and calibration tests for each optimizer, and the additivity test, by name.

    The calibration test with Adam is left out where gradient and noise are both in proportion to the bound
    (``saturates``), because Adam divides out any common factor.
    """
    questions: dict[str, Callable[[float], Finding]] = {}
    for optimizer in optimizers:
        hyper = HyperParameters(1.0, learning_rate=RATES[optimizer], optimizer=optimizer)
        for name, question in (("bound", bound_finding), ("per example", per_example_finding)):
            questions[f"{name}, {optimizer}"] = _without_chance(question, implementation, hyper)
        if optimizer == "sgd" or not implementation.saturates:
            questions[f"calibration, {optimizer}"] = partial(calibration_finding, implementation, hyper)
    plain = HyperParameters(0.5, learning_rate=RATES["sgd"])
    questions["additivity"] = lambda alpha: additivity_finding(implementation, plain)
    return questions


def _without_chance(
    question: Callable[[Implementation, HyperParameters], Finding],
    implementation: Implementation,
    hyper: HyperParameters,
) -> Callable[[float], Finding]:
    """Returns a question that takes no share of the level, since its answer involves no chance."""
    return lambda alpha: question(implementation, hyper)


def black_box_findings(
    implementation: Implementation, alpha: float, optimizers: Sequence[Optimizer] = ("sgd", "adam")
) -> list[Finding]:
    """Answers all questions; ``alpha`` is shared among those that can raise a false alarm."""
    questions = black_box_questions(implementation, optimizers)
    share = shares(alpha, sum(name.startswith("calibration") for name in questions))
    return [question(share) for question in questions.values()]
