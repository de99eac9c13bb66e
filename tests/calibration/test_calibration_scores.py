"""Scores of binned sums against torchmetrics, scikit-learn and plain loops; sums that no split changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError

from lipdp_lightning.calibration import (
    CalibrationSums,
    ClassificationScores,
    binned_sums,
    check_labels,
    log_probabilities,
    scores_of_sums,
)
from lipdp_lightning.calibration.sums import LOSS_UNIT, UNIT

FLOAT32 = 2e-6  # torchmetrics computes calibration errors in float32; the loop below is compared at 1e-9


def example(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are too loud for their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator)
    return logits, torch.multinomial((logits / 2).softmax(1), 1, generator=generator).squeeze(1)


def scores(logits: Tensor, labels: Tensor, bins: int = 15, **options: Any) -> ClassificationScores:
    metric = CalibrationSums(options.pop("classes", logits.shape[-1]), bins, **options)
    for some, own in zip(logits.split(97), labels.split(97), strict=True):
        metric.update(some, own)
    return scores_of_sums(metric.compute())


@pytest.mark.parametrize(("classes", "bins"), [(2, 15), (5, 15), (7, 4)])
def test_scores_are_those_of_torchmetrics_and_scikit_learn(classes: int, bins: int) -> None:
    logits, labels = example(700, classes)
    found, p = scores(logits, labels, bins), logits.double().softmax(1)
    assert found.rows == 700 and found.undefined == 0
    errors = {norm: MulticlassCalibrationError(classes, bins, norm=norm)(p, labels).item() for norm in ("l1", "max")}
    assert found.ece == pytest.approx(errors["l1"], abs=FLOAT32)
    assert found.mce == pytest.approx(errors["max"], abs=FLOAT32)
    assert found.nll == pytest.approx(log_loss(labels, p), abs=1e-7)
    assert found.brier == pytest.approx(brier_score_loss(labels, p, labels=range(classes)), abs=1e-9)
    assert found.accuracy == pytest.approx((p.argmax(1) == labels).double().mean().item())
    assert found.confidence == pytest.approx(p.max(1).values.mean().item(), abs=1e-9)
    for k, own in enumerate(found.per_class):
        is_k = (labels == k).long()
        assert own.rows == is_k.sum()
        assert own.ece == pytest.approx(BinaryCalibrationError(bins)(p[:, k], is_k).item(), abs=FLOAT32)
        assert own.mce == pytest.approx(BinaryCalibrationError(bins, norm="max")(p[:, k], is_k).item(), abs=FLOAT32)
        assert own.brier == pytest.approx(brier_score_loss(is_k, p[:, k]), abs=1e-9)
        assert own.nll == pytest.approx(log_loss(is_k, p[:, k]), abs=1e-7)
        shares, means = calibration_curve(is_k, p[:, k], n_bins=bins)
        assert [s for s in own.diagram.observed if s is not None] == pytest.approx(shares)
        assert [m for m in own.diagram.predicted if m is not None] == pytest.approx(means, abs=1e-9)
    assert found.classwise_ece == pytest.approx(np.mean([own.ece for own in found.per_class]))
    assert ClassificationScores.from_dict(found.to_dict()) == found


def test_the_confidence_histogram_is_that_of_a_loop() -> None:
    logits, labels = example(300, 4, seed=1)
    every, p = scores(logits, labels, 10), logits.double().softmax(1).numpy()
    found, gaps = every.diagram, []
    for b in range(10):
        inside = [i for i in range(300) if b / 10 < p[i].max() <= (b + 1) / 10]
        assert found.rows[b] == len(inside)
        if inside:
            right = np.mean([p[i].argmax() == labels[i].item() for i in inside])
            assert found.observed[b] == pytest.approx(right)
            mean = np.mean([p[i].max() for i in inside])
            assert found.predicted[b] == pytest.approx(mean, abs=1e-9)
            gaps.append((len(inside), abs(right - mean)))
        else:
            assert found.observed[b] is None and found.predicted[b] is None
    assert every.ece == pytest.approx(sum(n * gap for n, gap in gaps) / 300, abs=1e-9)
    assert every.mce == pytest.approx(max(gap for _, gap in gaps), abs=1e-9)


def test_one_logit_stands_for_two_classes_and_probabilities_for_logits() -> None:
    logits, labels = example(200, 2, seed=2)
    single = logits[:, 1] - logits[:, 0]
    two = scores(logits.double(), labels)
    assert scores(single.double(), labels, classes=2).nll == pytest.approx(two.nll, abs=1e-6)
    assert scores(single.sigmoid().double(), labels, classes=2, outputs="probabilities").ece == pytest.approx(
        two.ece, abs=1e-6
    )
    warm = scores(logits.double(), labels, temperature=2.0)
    p = (logits.double() / 2).softmax(1)
    assert warm.nll == pytest.approx(log_loss(labels, p), abs=1e-7)
    assert scores(p, labels, outputs="probabilities").nll == pytest.approx(warm.nll, abs=1e-6)


def test_pixels_are_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(5, 3, 4, 2, generator=generator), torch.randint(3, (5, 4, 2), generator=generator)
    flat = logits.permute(0, 2, 3, 1).reshape(-1, 3)
    assert scores(logits, labels, classes=3) == scores(flat, labels.flatten())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=120, max_size=120), st.integers(0, 1000))
def test_no_split_and_no_order_changes_a_bit_of_the_sums(shares: list[int], seed: int) -> None:
    logits, labels = example(120, 3, seed)
    log_p, share = log_probabilities(logits), torch.tensor(shares)
    whole = binned_sums(log_p, labels, 15)
    parts = [binned_sums(log_p[share == s].flip(0), labels[share == s].flip(0), 15) for s in range(4)]
    for name, value in whole.items():
        assert value.dtype == torch.int64 and torch.equal(sum(part[name] for part in parts), value), name


def test_sums_of_floats_would_depend_on_the_split() -> None:
    """What the whole numbers are for: the same sum in floating point is another one when it is split."""
    p = log_probabilities(example(2000, 3)[0]).exp().max(1).values
    assert any(float(p.sum()) != float(p[:cut].sum() + p[cut:].sum()) for cut in (311, 800, 1207, 1700))
    units = (p * UNIT).round().long()
    assert all(units.sum() == units[:cut].sum() + units[cut:].sum() for cut in (311, 800, 1207, 1700))


def test_a_confident_class_does_not_cancel() -> None:
    """-log(1 - p) of p = 1 - 1e-26 is 60; from 1 - p itself it would be infinite."""
    logits, labels = torch.tensor([[60.0, 0.0], [60.0, 0.0]]), torch.tensor([1, 0])
    own = binned_sums(log_probabilities(logits), labels)
    assert own["class_nll"].tolist() == pytest.approx([60 * LOSS_UNIT, 60 * LOSS_UNIT]) and not own["impossible"].any()
    assert 1 - torch.tensor([60.0, 0.0]).double().softmax(0)[0].item() == 0.0


def test_what_has_no_score() -> None:
    logits, labels = example(50, 3)
    logits[7, 1] = torch.nan
    found = scores(logits, labels)
    assert found.undefined == 1 and found.rows == 50 and math.isnan(found.nll) and math.isnan(found.ece)
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    wrong = scores(certain, torch.tensor([0, 1, 1]), outputs="probabilities")
    assert math.isinf(wrong.nll) and wrong.ece == pytest.approx(1 / 3) and wrong.brier == pytest.approx(1 / 3)
    assert math.isinf(wrong.per_class[0].nll)
    assert wrong.diagram.rows[-1] == 3 and wrong.per_class[0].diagram.rows[0] == 1
    even = scores(torch.full((4, 2), 0.5), torch.tensor([0, 1, 0, 1]), 2, outputs="probabilities")
    assert even.diagram.rows == (4, 0)  # bins are closed on the right
    right = scores(certain, torch.tensor([0, 1, 0]), outputs="probabilities")
    assert right.nll == right.ece == right.mce == right.brier == 0.0


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: CalibrationSums(3, outputs="probabilities").update(torch.full((2, 3), 0.4), torch.tensor([0, 1])),
         "sum to 1.2 over the classes, not to one"),
        (lambda: CalibrationSums(3, outputs="probabilities").update(torch.ones(4, 3) + 1, torch.zeros(4)),
         "not in .0, 1."),
        (lambda: check_labels(torch.ones(30), 3), "at least two classes, and all 30 rows have class 1"),
        (lambda: check_labels(torch.ones(0), 3), "there are no rows"),
        (lambda: CalibrationSums(1), "1 class"),
        (lambda: CalibrationSums(3, bins=0), "0 bins"),
        (lambda: CalibrationSums(3).update(torch.randn(4, 2), torch.zeros(4)), "2 classes, and 3 were declared"),
        (lambda: CalibrationSums(3).update(torch.randn(2, 3), torch.tensor([0, 3])), "a label is 3"),
        (lambda: CalibrationSums(3).update(torch.randn(2, 3), torch.tensor([0.0, 0.5])), "a label is 0.5"),
        (lambda: scores_of_sums(CalibrationSums(3)._defaults), "no rows"),
        (lambda: log_probabilities(torch.randn(2, 3), 0.0), "temperature 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_hint(action: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        action()
    assert "HINT" in str(caught.value)
