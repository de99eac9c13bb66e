"""Forecasts whether a run will learn, before anything private is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..privacy.plan import PrivacyPlan
from ..training.module import PrivateModule
from .public_rows import PublicRows, made_up_rows
from .public_training import MOST_STEPS, LayerSignal, Outcome, PublicTraining, Size, size_of

MOST_OPERATIONS = 1e11
LARGEST_OPERATIONS = 2e12
ENOUGH_SIGNAL = 0.25
"""The signal over the noise of the run in the median layer from which on it is expected to learn after few steps."""

CLOSE = 0.1
"""The relative distance from the score that is needed within which the score of few rows says nothing."""

BORDER = 0.25
"""The relative distance from the score that is needed within which a run may end on either side."""

EXPLAINED = 0.1
"""The share of the variance that a regression has to explain."""

_EXACT = ("exact", "exact_layerwise")
_WITHOUT = {
    "none": "there is no noise",
    "clip_flat": "opacus clips the examples' gradients, which a forecast does not repeat",
    "clip_per_layer": "opacus clips the examples' gradients, which a forecast does not repeat",
    "clip_ghost": "opacus clips the examples' gradients, which a forecast does not repeat",
}


class NoForecast(ValueError):
    """Raised where a forecast cannot be made; the message says why."""


@dataclass(frozen=True)
class Forecast:
    """Holds what training a copy of the network on public rows came to, with the noise of the plan.

    Attributes:
        outcome: the signal of every layer, and the score on further public rows.
        source: where the rows come from.
        scaling: the scaling of the plan.
        short: whether the network is so large that fewer steps were taken than show whether it learns.
    """

    outcome: Outcome
    source: str
    scaling: str
    short: bool = False

    @property
    def needed(self) -> float:
        """The score from which on a run is expected to learn: twice chance, or half of the way from chance to 1."""
        chance = self.outcome.chance
        return EXPLAINED if chance == 0 else min(2 * chance, (1 + chance) / 2)

    @property
    def learns(self) -> bool:
        """Returns whether the run is expected to learn, from the score, or where that says little from the signal.

        It says little if it is close to what is needed, and if it is low after few steps. The head of a deep network
        has a signal even if nothing of the input reaches it, so the median layer decides then.
        """
        score, needed = self.outcome.score, self.needed
        if abs(score - needed) <= CLOSE * needed or (self.short and score < needed):
            return self.typical.over_run >= ENOUGH_SIGNAL
        return score >= needed

    @property
    def uncertain(self) -> bool:
        """Returns whether the score is so close to what is needed that a run may end on either side."""
        return abs(self.outcome.score - self.needed) <= BORDER * self.needed

    @property
    def weakest(self) -> LayerSignal:
        """The layer with the least signal for its noise."""
        return min(self.outcome.signals, key=lambda signal: signal.over_run)

    @property
    def typical(self) -> LayerSignal:
        """The layer in the middle of all, by its signal over the noise; the lower of two."""
        ordered = sorted(self.outcome.signals, key=lambda signal: signal.over_run)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def strongest(self) -> LayerSignal:
        """The layer with the most signal for its noise."""
        return max(self.outcome.signals, key=lambda signal: signal.over_run)

    def signals(self) -> dict[str, LayerSignal]:
        """Returns the signal of each layer, by name."""
        return {signal.name: signal for signal in self.outcome.signals}

    def verdict(self) -> str:
        """Returns the forecast in a sentence or two, with a HINT if the run is not expected to learn."""
        outcome, weakest = self.outcome, self.weakest
        size = f"{outcome.size.steps} coarse steps on {self.source}"
        score = "explained variance" if outcome.chance == 0 else "accuracy"
        result = f"{size} end at {score} {outcome.score:.2f}, where chance is {outcome.chance:.2f}"
        if self.learns and outcome.score < self.needed:
            middle = self.typical
            why = "the network is too large to try more, and" if self.short else "the score is close:"
            return (
                f"this run is expected to learn, by its signal alone: in the median layer, {middle.name}, it is "
                f"{middle.over_run:.2g} of the noise over the run; {why} {result}"
            )
        if self.learns:
            border = f"; that is close to {self.needed:.2f}, below which a run has learnt nothing, and it may end there"
            return f"this run is expected to learn: {result}{border if self.uncertain else ''}"
        signal = f"{weakest.per_step:.1g} of its noise in a step, {weakest.over_run:.1g} over the run"
        return (
            f"this run is not expected to learn: {result}; the signal of {weakest.name} is {signal}. "
            f"HINT: {self._hint()}"
        )

    def _hint(self) -> str:
        signals = self.outcome.signals
        if all(signal.over_run == 0 for signal in signals):
            return (
                "no layer has any signal: look for an activation, a normalisation or a zero that lets nothing through."
            )
        if self.scaling not in _EXACT and len(signals) > 1:
            return "leave privacy.scaling, allocation and max_norm out, and auto takes the exact norms of gradients."
        if self.typical.over_run < self.strongest.over_run / 10:
            return (
                f"{self.strongest.name} has a signal and most layers have none: normalisations with a smaller floor "
                "(norm_alpha), or fewer layers."
            )
        if self.strongest.over_run < 1:
            return "the noise is too large: more epochs, a larger batch_size, fewer parameters, or a larger epsilon."
        return "the noise leaves a signal: try other learning rates, fewer layers, or a larger epsilon."

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        outcome = self.outcome
        layers = [vars(signal) for signal in outcome.signals]
        return {
            "expected_to_learn": self.learns, "uncertain": self.uncertain, "score": outcome.score,
            "chance": outcome.chance, "needed": self.needed, "short": self.short, "inputs": self.source,
            "steps": outcome.size.steps, "rows_per_step": outcome.size.rows, "layers": layers,
            "verdict": self.verdict(),
        }  # fmt: skip


def forecast(
    module: PrivateModule, plan: PrivacyPlan, data: Any, inputs: PublicRows | None = None, size: Size | None = None
) -> Forecast:
    """Returns the forecast of a run, from declared numbers and public rows alone.

    Args:
        module: the module at its initial weights, which stays as it is.
        plan: the settled plan.
        data: the data module, of which only the declared shape and vocabulary of an example are read.
        inputs: public rows; made-up ones if there are none.
        size: steps and rows; by default, those that cost little.

    Raises:
        NoForecast: If there is none for this method, if it would take long, or if made-up rows do not fit the network.
    """
    if plan.scaling in _WITHOUT:
        raise NoForecast(f"no forecast under scaling {plan.scaling!r}: {_WITHOUT[plan.scaling]}.")
    if not plan.is_settled:
        raise NoForecast(
            "no forecast: the network has no certificate, so its scaling is not settled. "
            "HINT: `lipdp certify` says why."
        )
    shape = tuple(data.input_shape)
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            return _forecast(module, plan, shape, inputs, size, getattr(data, "vocabulary", None))
    except NoForecast:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        rows = "the public rows" if inputs is not None else "made-up rows"
        hint = "" if "HINT" in message else " HINT: --public-inputs FILE.npz, with rows as the network receives them."
        raise NoForecast(f"no forecast: a step fails on {rows}: {type(error).__name__}: {message}{hint}") from error


def _forecast(
    module: PrivateModule, plan: PrivacyPlan, shape: tuple[int, ...], inputs: PublicRows | None, size: Size | None,
    vocabulary: int | None,
) -> Forecast:  # fmt: skip
    training = PublicTraining(module, plan, shape)
    if not any(parameter.requires_grad for parameter in training.network.parameters()):
        raise NoForecast(
            "no forecast: no layer is trained, so that nothing can be learnt. HINT: call requires_grad_(True) on one."
        )
    sample = torch.zeros(1, *shape) if inputs is None else inputs.x[:1]
    outputs = training.outputs(sample)
    operations, classes = training.operations(sample), max(2, outputs)
    if size is None:
        size = size_of(operations, plan.steps, classes, MOST_OPERATIONS)
    if operations * size.steps * size.rows > LARGEST_OPERATIONS:
        raise NoForecast(
            f"no forecast: the smallest takes {operations * size.steps * size.rows:.1g} operations. "
            "HINT: forecast a thinner or shallower network of the same kind."
        )
    rows = inputs
    if rows is None:
        count = size.rows * (size.steps + 4)
        rows = made_up_rows(shape, module.task, outputs, module.input_bound, count, 0, vocabulary)
    return Forecast(training.run(rows, size), rows.source, plan.scaling, size.steps < min(plan.steps, MOST_STEPS))


def signal_columns(found: Forecast | None, name: str) -> dict[str, float]:
    """Returns a layer's ratios of signal to noise for a table, rounded to what a forecast can tell."""
    signal = None if found is None else found.signals().get(name)
    if signal is None:
        return {}
    return {"signal_step": _rounded(signal.per_step), "signal_run": _rounded(signal.over_run)}


def _rounded(value: float) -> float:
    return 0.0 if value == 0 else round(value, 1 - math.floor(math.log10(abs(value))))
