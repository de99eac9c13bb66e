"""An accuracy beside that of always predicting the most frequent class."""

from __future__ import annotations

from typing import Any

import pytest
from report_examples import healthy

from lipdp_lightning.report.majority import Majority
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.render_html import render_html
from lipdp_lightning.report.render_markdown import render_markdown
from lipdp_lightning.report.words import cautions


def scored(accuracy: float, rate: float, error: float, **changes: Any) -> RunFacts:
    metrics = {
        "test/accuracy": accuracy, "test/majority_rate": rate, "test/standard_error": error,
        "test/balanced_accuracy": 0.1, "test/auroc": 0.5,
    }  # fmt: skip
    sources = dict.fromkeys(metrics, "validation")
    return healthy(metrics=metrics, metric_sources=sources, primary_metric="test/accuracy", **changes)


@pytest.mark.parametrize("accuracy", [0.08, 0.1, 0.119])
def test_a_run_that_is_no_better_gets_no_tick_and_a_caution(accuracy: float) -> None:
    facts = scored(accuracy, 0.1, 0.01)
    page = render_html(facts)
    assert "✓" not in page and "no better than the most frequent class" in page and "hero warn" in page
    assert any("no better than always predicting" in text for text in cautions(facts))
    assert "no better than always predicting" in render_markdown(facts)


@pytest.mark.parametrize(("accuracy", "error"), [(0.121, 0.01), (0.95, 0.0)])
def test_a_run_that_is_better_gets_its_tick(accuracy: float, error: float) -> None:
    facts = scored(accuracy, 0.1, error)
    assert "✓ certified: true" in render_html(facts) and cautions(facts) == []
    assert "the most frequent class alone: 10\u00a0%, balanced accuracy 10\u00a0%, AUROC 0.500" in render_html(facts)


def test_an_uncertified_run_that_is_no_better_says_both() -> None:
    page = render_html(scored(0.1, 0.1, 0.0, certified=False, scaling="batch_max"))
    assert "NOT PRIVATE" in page and "no better than always predicting" in page


def test_the_numbers_of_other_weights_are_compared_with_each_other() -> None:
    metrics = {"test/accuracy_last_weights": 0.9, "test/majority_rate_last_weights": 0.5, "test/majority_rate": 0.8}
    assert Majority.of(metrics, "test/accuracy_last_weights") is None
    found = Majority.of(metrics | {"test/standard_error_last_weights": 0.1}, "test/accuracy_last_weights")
    assert found is not None and found.rate == 0.5 and found.balanced_accuracy is None


@pytest.mark.parametrize("missing", ["majority_rate", "standard_error"])
@pytest.mark.parametrize("value", [None, float("nan"), "0.1", True])
def test_what_was_not_measured_is_not_compared(missing: str, value: Any) -> None:
    metrics = {"test/accuracy": 0.1, "test/majority_rate": 0.1, "test/standard_error": 0.0}
    assert Majority.of(metrics, "test/accuracy") is not None
    assert Majority.of(metrics | {f"test/{missing}": value}, "test/accuracy") is None
    assert Majority.of(metrics, "test/mae") is None and Majority.of(metrics, None) is None
