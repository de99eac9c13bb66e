"""The JSON report: its keys, strictness, and what it refuses to say."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from report_examples import empty, healthy, not_private, stopped_early

from lipdp_lightning.report.model import RunFacts, report_dict, report_json

CONTRACT = {
    *("certified", "epsilon", "delta", "adjacency", "noise_multiplier", "sample_rate", "steps_taken"),
    *("accountant", "scaling", "allocation", "groups", "metrics", "nonprivate_released", "secret_fixed"),
    "versions",
}


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("facts", [healthy(), stopped_early(), not_private(), empty()])
def test_every_report_has_the_keys_of_the_contract(facts: RunFacts) -> None:
    report = strict(report_json(facts))
    assert set(report) >= CONTRACT
    assert isinstance(report["groups"], list) and isinstance(report["nonprivate_released"], list)
    assert isinstance(report["metrics"], dict) and isinstance(report["versions"], dict)


def test_the_guarantee_is_that_of_the_planned_steps() -> None:
    report = strict(report_json(stopped_early()))
    assert report["epsilon"] == 2.39185
    assert report["epsilon_taken"] == 1.2757
    assert (report["steps_taken"], report["steps_planned"]) == (4000, 14062)


NAMED_EPSILON = re.compile(r"epsilon|\beps\b")


def every_epsilon(value: Any, path: str = "") -> list[str]:
    """Paths of all entries named epsilon that hold a number."""
    if isinstance(value, dict):
        own = [f"{path}.{k}" for k, v in value.items() if NAMED_EPSILON.search(k) and isinstance(v, (int, float))]
        return own + [hit for k, v in value.items() for hit in every_epsilon(v, f"{path}.{k}")]
    if isinstance(value, list):
        return [hit for i, v in enumerate(value) for hit in every_epsilon(v, f"{path}[{i}]")]
    return []


def test_without_a_certificate_an_epsilon_is_only_a_claim_of_the_paper() -> None:
    facts = not_private(
        metrics={"val_accuracy": 0.9, "privacy/epsilon": 2.3},
        ledger=[{"mechanism": "gaussian", "parameters": {"eps": 2.3, "epsilon_upper": 2.4}, "epsilon": 2.4}],
    )
    report = strict(report_json(facts))
    assert report["certified"] is False and report["epsilon"] is None
    assert report["epsilon_claimed_by_paper"] == 2.39185
    hits = every_epsilon(report)
    assert hits and all(hit.endswith("epsilon_claimed_by_paper") for hit in hits)
    assert report["history"][-1]["epsilon_claimed_by_paper"] == facts.history[-1]["epsilon"]
    assert len(every_epsilon(strict(report_json(healthy())))) > 12  # the check sees those of a certified run


def test_the_claim_of_the_paper_may_be_given_apart() -> None:
    report = report_dict(not_private(epsilon=None, epsilon_claimed_by_paper=1.9))
    assert (report["epsilon"], report["epsilon_claimed_by_paper"]) == (None, 1.9)


def test_undefined_numbers_become_null_and_are_named() -> None:
    rows = [{"step": 1, "val_loss": math.nan}, {"step": 2, "val_loss": math.inf, "epsilon": np.float64("-inf")}]
    facts = healthy(history=rows, metrics={"val_loss": float("nan")}, metric_sources={"val_loss": "public"})
    report = strict(report_json(facts))
    assert report["history"][0]["val_loss"] is None and report["metrics"]["val_loss"] is None
    assert set(report["nonfinite_values"]) == {
        *("history[0].val_loss: nan", "history[1].val_loss: inf", "history[1].epsilon: -inf"),
        "metrics.val_loss: nan",
    }
    with pytest.raises(ValueError, match="NaN"):
        strict(json.dumps(rows))


def test_a_diverged_run_does_not_list_every_step() -> None:
    report = report_dict(healthy(history=[{"step": i, "val_loss": math.nan} for i in range(3000)]))
    assert len(report["nonfinite_values"]) == 51
    assert report["nonfinite_values"][-1] == "and 2950 more"


def test_arrays_and_tensors_become_plain_numbers() -> None:
    groups = [{"name": "a", "delta": torch.tensor(1.5, dtype=torch.float64), "parameters": np.int64(7)}]
    facts = healthy(groups=groups, metrics={"val_accuracy": np.float32(0.5), "per_class": np.array([0.25, 1.0])})
    report = strict(report_json(facts))
    assert report["groups"][0] == {"name": "a", "delta": 1.5, "parameters": 7}
    assert report["metrics"] == {"val_accuracy": 0.5, "per_class": [0.25, 1.0]}


def test_strings_that_are_not_unicode_are_kept_readable(tmp_path: Any) -> None:
    from lipdp_lightning.report.atomic import write_atomically

    path = write_atomically(tmp_path / "r.json", report_json(healthy(title="bad \udc80 byte, café")))
    assert strict(path.read_text(encoding="utf-8"))["title"] == "bad \udc80 byte, café"


@pytest.mark.parametrize("facts", [healthy(), stopped_early(), not_private(), empty()])
def test_a_report_can_be_rendered_again_from_its_json(facts: RunFacts) -> None:
    report = strict(report_json(facts))
    assert report_dict(RunFacts.from_dict(report)) == report


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "batch_max": {"scaling": "batch_max"},
    "epsilon None": {"epsilon": None},
    "epsilon inf": {"epsilon": math.inf, "epsilon_upper": None},
    "upper end": {"epsilon": 2.38},
    "delta 1.0": {"delta": 1.0},
    "noise multiplier 0.0": {"noise_multiplier": 0.0},
    "sample rate": {"sample_rate": 256 / 59999},
    "14063 steps were taken": {"steps_taken": 14063},
    "adjacency 'swap'": {"adjacency": "swap"},
    "'test set'": {"metric_sources": {"val_accuracy": "test set"}},
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_facts_that_contradict_the_guarantee_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        healthy(**CONTRADICTIONS[words])
    assert "HINT:" in str(error.value)


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        healthy(scaling="batch_max", noise_multiplier=0.0, adjacency="swap", steps_taken=99999)
    assert str(error.value).count("HINT:") == 4


def test_an_uncertified_run_needs_no_noise_and_no_epsilon() -> None:
    facts = not_private(noise_multiplier=0.0, epsilon=math.inf, scaling="none", delta=None, sample_rate=None)
    assert strict(report_json(facts))["epsilon"] is None


def test_what_the_facts_show_to_be_not_private_is_listed_without_being_told() -> None:
    facts = healthy(
        nonprivate_released=[],
        metrics={"val_accuracy": 0.9, "train_auc": 0.8, "somewhere": 0.7},
        metric_sources={"val_accuracy": "validation", "train_auc": "private"},
        history=[{"step": 1, "nonprivate/train_loss": 0.2, "gradient_to_noise": 0.1}],
    )
    names = [item.partition(":")[0] for item in report_dict(facts)["nonprivate_released"]]
    assert names == ["train_auc", "somewhere", "nonprivate/train_loss"]


def test_the_model_of_an_uncertified_run_is_itself_not_private() -> None:
    assert any("the model itself" in item for item in not_private().released_without_privacy())
    assert not any("the model itself" in item for item in healthy().released_without_privacy())
