"""Scores beside an accuracy, compared with scikit-learn's and with a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from small_runs import Blobs, fit, make_module, make_plan, make_trainer
from torch import Tensor, nn

from lipdp_lightning.experiment.held_out import held_out_metrics
from lipdp_lightning.training.class_scores import ClassScores


def scores(predicted: Tensor, labels: Tensor, parts: int = 1) -> dict[str, float]:
    metric = ClassScores()
    for rows in torch.arange(len(labels)).chunk(parts):
        metric.update(predicted[rows], labels[rows])
    return {name: float(value) for name, value in metric.compute().items()}


@pytest.mark.parametrize("parts", [1, 7])
def test_scores_of_many_classes_are_those_of_scikit_learn(parts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 300, replacement=True, generator=generator)
    logits = torch.randn(300, 3, generator=generator) + nn.functional.one_hot(labels, 3)
    found = scores(logits, labels, parts)
    assert found["majority_rate"] == pytest.approx(labels.bincount().max().item() / 300)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, logits.softmax(1), multi_class="ovr"), abs=1e-6)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
def test_the_predicted_class_is_that_of_the_accuracy_at_any_scale(scale: float) -> None:
    """A network that has barely moved has logits of 1e-8, whose probabilities are equal in float32."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(300) % 3
    logits = torch.randn(300, 3, generator=generator) + nn.functional.one_hot(labels, 3)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    found = scores(scale * logits, labels)
    assert found["balanced_accuracy"] == pytest.approx(accuracy) and accuracy > 0.5
    assert found["auroc"] > 0.7


def test_scores_of_two_classes_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(2)
    labels = (torch.rand(200, generator=generator) < 0.2).long()
    shares = (torch.randn(200, generator=generator) + labels).sigmoid()
    found = scores(shares, labels)
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, shares), abs=1e-6)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, shares > 0.5))


def test_the_standard_error_is_that_of_repeated_draws_of_the_rows() -> None:
    """Accuracy and majority rate are measured on the same rows, so their errors must not be added as if apart."""
    generator = np.random.default_rng(0)
    population = generator.choice(3, 50_000, p=[0.5, 0.3, 0.2])
    right = generator.random(50_000) < 0.6
    guesses = np.where(right, population, (population + 1) % 3)
    gains, errors = [], []
    for _ in range(400):
        rows = generator.integers(0, 50_000, 500)
        logits = 9.0 * nn.functional.one_hot(torch.tensor(guesses[rows]), 3)
        found = scores(logits, torch.tensor(population[rows]))
        gains.append(float((guesses[rows] == population[rows]).mean()) - found["majority_rate"])
        errors.append(found["standard_error"])
    assert np.mean(errors) == pytest.approx(np.std(gains), rel=0.15)


def test_one_predicted_class_has_no_gain_and_one_label_no_auroc() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    constant = torch.tensor([[1.0, 0.0, 0.0]]).repeat(5, 1)
    found = scores(constant, labels)
    assert found["majority_rate"] == pytest.approx(0.6) and found["standard_error"] == 0.0
    assert found["balanced_accuracy"] == pytest.approx(1 / 3) and found["auroc"] == pytest.approx(0.5)
    assert math.isnan(scores(constant, torch.zeros(5, dtype=torch.long))["auroc"])
    assert math.isnan(scores(constant * torch.nan, labels)["auroc"])
    assert math.isnan(scores(constant[:1], labels[:1])["standard_error"])


def test_an_evaluation_has_them_and_training_does_not_pay_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data, calls = make_module(), Blobs(), []
    monkeypatch.setattr(ClassScores, "update", lambda self, *rows: calls.append(rows))
    options = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1}
    _, trainer = fit(make_plan(), module=module, data=data, trainer_options=options)
    assert calls == [] and "validation/majority_rate" not in trainer.callback_metrics
    monkeypatch.undo()
    metrics = held_out_metrics(make_trainer("auto", limit_val_batches=1.0), module, data)
    assert metrics["validation/majority_rate"] == pytest.approx(1 / 3) and 0 < metrics["validation/auroc"] <= 1
    again = held_out_metrics(make_trainer("auto", limit_val_batches=1.0), module, data)
    assert again == metrics
