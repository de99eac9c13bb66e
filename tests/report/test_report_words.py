"""The sentences of a report say what follows from its numbers, and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from report_examples import empty, healthy, layer_groups, not_private, stopped_early

from lipdp_lightning.report.words import (
    adjacency_words,
    budget_shares,
    cautions,
    find_primary_metric,
    format_metric,
    guarantee_sentence,
    guess_bound,
    percent_at_most,
    source_words,
)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.1, 1e-5), (1.0, 0.1), (2.392, 1e-5), (8.0, 0.0)])
def test_the_bet_is_bounded_and_the_bound_is_attained(epsilon: float, delta: float) -> None:
    # The worst pair for (epsilon, delta): reveal with probability delta, else randomised response.
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    first = np.array([delta, 0.0, (1 - delta) * keep, (1 - delta) * (1 - keep)])
    second = first[[1, 0, 3, 2]]
    events = [np.array([(mask >> i) & 1 for i in range(4)], dtype=bool) for mask in range(16)]
    assert all(first[e].sum() <= math.exp(epsilon) * second[e].sum() + delta + 1e-12 for e in events)
    best = max(0.5 * first[e].sum() + 0.5 * second[~e].sum() for e in events)
    assert guess_bound(epsilon, delta) == pytest.approx(best, abs=1e-12)


def test_the_bet_does_not_overflow() -> None:
    assert guess_bound(5000.0, 0.0) == 1.0


def test_percentages_are_rounded_up() -> None:
    assert percent_at_most(0.91601).split() == ["91.7", "%"]
    assert percent_at_most(0.5).split() == ["50", "%"]
    assert percent_at_most(0.99999).split() == ["100", "%"]


def test_the_sentence_fits_the_adjacency() -> None:
    assert "whether one given example was among the training data" in guarantee_sentence(healthy())
    assert "which of two possible versions of one example" in guarantee_sentence(stopped_early())
    assert "patient" in guarantee_sentence(healthy(unit="patient"))
    assert adjacency_words(healthy()) != adjacency_words(stopped_early())


def test_the_sentence_admits_a_weak_guarantee_and_other_releases() -> None:
    weak = empty(epsilon=9.0, epsilon_upper=9.0)
    assert "promises little" in guarantee_sentence(weak)
    assert "promises little" not in guarantee_sentence(empty())
    assert "released without privacy" in guarantee_sentence(healthy())
    assert "released without privacy" not in guarantee_sentence(empty())


def test_without_a_certificate_the_sentence_names_the_reason() -> None:
    assert "maximum over the whole private batch" in guarantee_sentence(not_private())
    assert "No noise was added" in guarantee_sentence(not_private(scaling="none", noise_multiplier=0.0))
    assert "my reason" in guarantee_sentence(not_private(not_certified_because="my reason"))
    assert "at most" not in guarantee_sentence(not_private())


def test_where_a_metric_comes_from_is_said_in_words() -> None:
    assert "private" in source_words(healthy(), "train_loss")
    assert "private" in source_words(healthy(), "never stated")
    assert "guarantee" in source_words(healthy(), "val_loss")
    assert "guarantee" not in source_words(not_private(), "val_loss")


def test_the_layers_share_one_budget() -> None:
    shares = budget_shares(healthy())
    assert shares is not None and sum(shares) == pytest.approx(1.0)
    assert budget_shares(healthy(scaling="joint")) is None
    assert budget_shares(empty()) is None


def test_noise_that_forgets_to_compose_over_layers_is_named() -> None:
    # the mistake of the papers: sigma Delta_k on each of the K layers, accounted as one mechanism
    groups = [{**group, "noise_std": 1.1 * group["delta"]} for group in layer_groups()]
    (text,) = cautions(healthy(groups=groups))
    assert "Do not rely on epsilon" in text and f"{1.1 / math.sqrt(6):.4g}" in text
    composed = [{**group, "noise_std": 1.1 * math.sqrt(6) * group["delta"]} for group in layer_groups()]
    assert cautions(healthy(groups=composed)) == []


def test_a_delta_of_one_over_the_data_set_is_named() -> None:
    assert any("delta" in text for text in cautions(healthy(delta=1 / 60000)))
    assert cautions(healthy()) == []


def test_accuracy_comes_before_loss_and_validation_before_training() -> None:
    rows = [{"step": 1, "epsilon": 1.0, "gradient_to_noise_acc": 1.0, "train_acc": 0.1, "val_loss": 3.0}]
    assert find_primary_metric(empty(history=rows)) == "train_acc"
    assert find_primary_metric(empty(history=[{**rows[0], "val_acc": 0.2}])) == "val_acc"
    assert find_primary_metric(empty(history=rows, primary_metric="val_loss")) == "val_loss"
    assert find_primary_metric(empty(history=[{"step": 1, "epsilon": 1.0, "lr": 0.1}])) is None


def test_only_accuracies_are_percentages() -> None:
    assert format_metric("val_accuracy", 0.97094).split() == ["97.09", "%"]
    assert format_metric("val_loss", 0.5) == "0.5"
    assert format_metric("acc", 97.0) == "97"
