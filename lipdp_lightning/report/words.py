"""Writes the sentences of a report, once for both the Markdown and the HTML page."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lipdp_lightning.report.formats import format_bound, format_number, is_number, plain_value
from lipdp_lightning.report.majority import Majority
from lipdp_lightning.report.model import NONPRIVATE_PREFIX, RunFacts

__all__ = [
    "adjacency_words",
    "budget_shares",
    "cautions",
    "find_primary_metric",
    "format_metric",
    "guarantee_sentence",
    "guess_bound",
    "is_doubtful",
    "likeliest_metric",
    "majority",
    "metric_label",
    "metric_names",
    "percent_at_most",
    "plan_facts",
    "source_words",
    "uncertified_reason",
]

NO_GUARANTEE = "NOT PRIVATE: certified: false"
SOURCES = {
    "public": "public data",
    "validation": "held-out records, which the guarantee does not cover",
    "private": "private data: this number is not private",
}
# Scalings whose per-layer sensitivities are separate bounds that compose to the plan's multiplier.
METHODS = {
    "clip_flat": "DP-SGD, flat clipping",
    "clip_per_layer": "DP-SGD, clipping layer by layer",
    "clip_ghost": "DP-SGD, flat clipping by ghost norms",
    "none": "no privacy: no clipping and no noise",
}
OPTIONAL = ("clipping", "clip_norm", "switch")
SEPARATE_BOUNDS = ("worst_case", "layerwise")
METRIC_ORDER = ("acc", "auc", "auroc", "f1", "r2", "loss", "error", "mse")
NOT_METRICS = ("step", "epoch", "gradient_to_noise", "epsilon", "eps", "delta", "lr", "learning_rate", "time")


def adjacency_words(facts: RunFacts) -> str:
    """Returns a description of the data sets between which the guarantee holds."""
    if facts.adjacency == "add_remove":
        return f"one {facts.unit} added to or removed from the training data"
    return f"one {facts.unit} of the training data replaced by another"


def guess_bound(epsilon: float, delta: float) -> float:
    """Returns the best probability of guessing, at even odds, which of two neighbouring data sets was used.

    Under (epsilon, delta) the two error rates satisfy a + e^epsilon b >= 1 - delta, also with a and b exchanged, so (a
    + b) / 2 >= (1 - delta) / (1 + e^epsilon).
    """
    odds_of_error = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return 1 - (1 - delta) * odds_of_error


def percent_at_most(probability: float) -> str:
    """Returns a probability in percent, rounded up to one decimal."""
    return f"{math.ceil(round(probability * 1000, 6)) / 10:g}\u00a0%"


def guarantee_sentence(facts: RunFacts) -> str:
    """Explains epsilon to a reader who has never heard of it."""
    if not facts.certified or facts.epsilon is None or facts.delta is None:
        return (
            "This run gives no privacy guarantee. Anyone who sees this model may learn about the records it "
            f"was trained on: treat it as you would treat the data itself. {uncertified_reason(facts)}"
        )
    bet = (
        f"whether one given {facts.unit} was among the training data"
        if facts.adjacency == "add_remove"
        else f"which of two possible versions of one {facts.unit} was in the training data"
    )
    bound = guess_bound(facts.epsilon, facts.delta)
    text = (
        "Anyone who sees this model, even with every update made while it was trained and with all the other "
        f"records in hand, and who bets at even odds on {bet}, is right at most "
        f"{percent_at_most(bound)} of the time. Tossing a coin is right 50\u00a0% of the time."
    )
    if facts.secret_fixed:
        text += " None of this holds against someone who knows the fixed secret."
    if bound > 0.995:
        text += " A bound this high promises little by itself."
    if facts.released_without_privacy():
        text += " This does not cover what is listed below as released without privacy."
    return text


def uncertified_reason(facts: RunFacts) -> str:
    """Returns why there is no certificate."""
    if facts.not_certified_because:
        return facts.not_certified_because
    if facts.scaling == "batch_max":
        return (
            "The scaling batch_max divides by a maximum over the whole private batch, so one record can "
            "change the contribution of every other one, and the noise was not calibrated to that."
        )
    if not facts.noise_multiplier:
        return "No noise was added."
    return "Its sensitivity bounds are not certified."


def budget_shares(facts: RunFacts) -> list[float] | None:
    """Returns (Delta_k / sigma_k)^2 sigma^2 per group, the part of the step's budget that each layer uses.

    Returns None if the scaling bounds all layers together, so that there are no parts, or if facts are missing.
    """
    if facts.scaling not in SEPARATE_BOUNDS or not facts.groups or not facts.noise_multiplier:
        return None
    shares = []
    for group in facts.groups:
        delta, noise = plain_value(group.get("delta")), plain_value(group.get("noise_std"))
        if not is_number(delta) or not is_number(noise) or not math.isfinite(delta):
            return None
        if delta == 0:
            shares.append(0.0)
            continue
        shares.append((delta / noise * facts.noise_multiplier) ** 2 if noise > 0 else math.inf)
    return shares


def _multiplier_of_the_layers(facts: RunFacts) -> float | None:
    """Returns the noise multiplier that the layers' noise amounts to, if it is below the plan's."""
    shares = budget_shares(facts)
    if shares is None or facts.noise_multiplier is None or sum(shares) <= 1 + 1e-6:
        return None
    return facts.noise_multiplier / math.sqrt(sum(shares))


def is_doubtful(facts: RunFacts) -> bool:
    """Returns whether something in the run revokes the guarantee, against some observers or against all."""
    return facts.secret_fixed or _multiplier_of_the_layers(facts) is not None


def majority(facts: RunFacts) -> Majority | None:
    """Returns the comparison of the headline's accuracy with the most frequent class, if both were measured."""
    return Majority.of(facts.metrics, find_primary_metric(facts))


def cautions(facts: RunFacts) -> list[str]:
    """Returns what a reader must know before believing the headline."""
    compared = majority(facts)
    useless = None if compared is None else compared.caution()
    return _cautions_of_privacy(facts) + ([] if useless is None else [useless])


def _cautions_of_privacy(facts: RunFacts) -> list[str]:
    if not facts.certified or facts.epsilon is None or facts.delta is None:
        return [_fixed_secret()] if facts.secret_fixed else []
    found = []
    if facts.secret_fixed:
        found.append(_fixed_secret())
    if facts.stopped_early:
        found.append(_stopped_early(facts))
    if facts.scaling.startswith("clip_"):
        found.append(_rests_on_clipping(facts))
    multiplier = _multiplier_of_the_layers(facts)
    if multiplier is not None:
        found.append(
            f"The noise per layer amounts to a noise multiplier of {format_number(multiplier)} only; epsilon "
            f"was computed for the plan's, {format_number(facts.noise_multiplier)}. Do not rely on epsilon."
        )
    if facts.delta * facts.dataset_size >= 0.9:
        found.append(
            f"delta = {format_bound(facts.delta)} is not well below 1 / {facts.dataset_size}: a mechanism "
            "that publishes one record in full could meet it. Choose a smaller delta."
        )
    return found


def _fixed_secret() -> str:
    return (
        "The secret behind the sampling and the noise was fixed by the user, a test option: whoever knows it "
        "can subtract the noise. Do not release this model as private."
    )


def _rests_on_clipping(facts: RunFacts) -> str:
    return (
        f"{METHODS[facts.scaling]}: the guarantee rests on clipping each {facts.unit}'s gradient to norm "
        f"{format_number(facts.clip_norm)} while training, through opacus. No bound of the network was used."
    )


def _stopped_early(facts: RunFacts) -> str:
    text = (
        f"Stopped after {facts.steps_taken} of {facts.steps_planned} planned steps. The guarantee remains "
        f"that of the plan, epsilon = {format_bound(facts.epsilon)}."
    )
    if facts.epsilon_taken is not None:
        text += (
            f" The steps taken account for epsilon = {format_bound(facts.epsilon_taken)}, which would be the "
            "guarantee only had this number of steps been fixed before training."
        )
    return text


def plan_facts(facts: RunFacts) -> dict[str, Any]:
    """Returns the facts that make up the plan table."""
    names = (
        *(
            "certified",
            "epsilon",
            "epsilon_lower",
            "epsilon_upper",
            "epsilon_taken",
            "delta",
            "adjacency",
            "unit",
        ),
        *("accountant", "noise_multiplier", "sample_rate", "dataset_size", "expected_batch_size"),
        *(
            "steps_planned",
            "steps_taken",
            "scaling",
            "allocation",
            "projection",
            "loss_clip",
            "cotangent_clip",
        ),
    )
    plan = {name: getattr(facts, name) for name in names}
    plan |= {name: value for name in OPTIONAL if (value := getattr(facts, name)) is not None}
    return plan | ({"method": METHODS[facts.scaling]} if facts.scaling in METHODS else {})


def _metric_names(facts: RunFacts) -> list[str]:
    return metric_names([facts.metrics, *facts.history])


def metric_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names in rows of numbers that are names of metrics, in order and once each."""
    names = (str(key) for row in rows for key, value in row.items() if is_number(value))
    return [
        name
        for name in dict.fromkeys(names)
        if not any(name.removeprefix(NONPRIVATE_PREFIX).lower().split("/")[-1].startswith(n) for n in NOT_METRICS)
        and not name.startswith("gradient_to_noise")
    ]


def find_primary_metric(facts: RunFacts) -> str | None:
    """Returns the metric of the headline and of the first plot: the declared one, else the likeliest by name."""
    return facts.primary_metric if facts.primary_metric is not None else likeliest_metric(_metric_names(facts))


def likeliest_metric(names: Iterable[str]) -> str | None:
    """Returns the name that reads most like that of the metric which a run is about; None if there are no names."""

    def rank(name: str) -> tuple[bool, int, bool]:
        kind = next((i for i, part in enumerate(METRIC_ORDER) if part in name.lower()), len(METRIC_ORDER))
        return name.startswith(NONPRIVATE_PREFIX), kind, "val" not in name.lower()

    return min(names, key=rank, default=None)


def is_fraction(name: str, values: Mapping[int, float] | list[float]) -> bool:
    """Returns whether a metric reads best in percent."""
    numbers = list(values.values()) if isinstance(values, Mapping) else values
    shares = ("acc", "majority_rate", "standard_error")
    return any(part in name.lower() for part in shares) and all(0 <= value <= 1 for value in numbers)


def format_metric(name: str, value: Any) -> str:
    """Returns a metric's value as text, an accuracy in percent."""
    if not is_number(value):
        return "-" if value is None else str(value)
    number = float(plain_value(value))
    if is_fraction(name, [number]):
        return f"{100 * number:.4g}\u00a0%"
    return format_number(number)


def metric_label(name: str) -> str:
    """Returns a metric's name in words, each of which is said once where it follows itself."""
    full = {"val": "validation", "acc": "accuracy", "nonprivate": "non-private", "train": "training"}
    words = [full.get(word.lower(), word) for word in re.split(r"[_/\s]+", name) if word]
    return " ".join(word for word, _ in itertools.groupby(words))


def source_words(facts: RunFacts, name: str) -> str:
    """Returns on which data a metric was computed, and what follows from it."""
    source = facts.metric_source(name)
    return "held-out records" if source == "validation" and not facts.certified else SOURCES[source]
