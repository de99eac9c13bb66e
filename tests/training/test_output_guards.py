"""Set-up refuses outputs that do not fit labels and loss, from declarations and made-up rows, before any step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_runs import Blobs, fit, make_module, make_plan
from torch import Tensor, nn

from lipdp_lightning.bounds.losses import BinaryCrossEntropy, CrossEntropy, Huber, Loss, MulticlassHinge, SquaredError
from lipdp_lightning.training.model_checks import output_problems


class Declared:
    """A data module's declarations, without rows."""

    def __init__(self, task: str | None, classes: int | None = None, target: tuple[int, ...] = ()) -> None:
        self.task, self.num_classes, self.target_shape = task, classes, target


@pytest.mark.parametrize(
    ("loss", "shape", "data", "expected"),
    [
        (CrossEntropy(), (9,), Declared("classification", 10), "9 outputs, and Declared declares 10 classes"),
        (CrossEntropy(), (1,), Declared("classification", 2), "1 output, and"),
        (MulticlassHinge(), (1,), Declared("classification", None), "1 output, and"),
        (CrossEntropy(), (10, 4), Declared("classification", 10), "(batch, 10, 4)"),
        (CrossEntropy(), (2,), Declared("binary"), "'binary_cross_entropy', with one output"),
        (CrossEntropy(class_weights=(1.0, 2.0)), (3,), Declared("classification", 3), "2 numbers for 3 outputs"),
        (BinaryCrossEntropy(), (2,), Declared("binary"), "(batch, 2), and the targets of Declared are 1 number"),
        (BinaryCrossEntropy(), (10,), Declared("classification", 10), "is for binary"),
        (Huber(), (2,), Declared("regression"), "1 number for each example"),
        (Huber(), (1,), Declared("regression", target=(3,)), "3 numbers for each example"),
        (SquaredError(), (10,), Declared("classification", 10), "is for regression"),
    ],
)
def test_outputs_that_do_not_fit(loss: Loss, shape: tuple[int, ...], data: Any, expected: str) -> None:
    (problem,) = output_problems(loss, shape, data)
    assert expected in problem and "HINT" in problem


@pytest.mark.parametrize(
    ("loss", "shape", "data"),
    [
        (CrossEntropy(), (10,), Declared("classification", 10)),
        (CrossEntropy(), (12,), Declared("classification", 10)),
        (BinaryCrossEntropy(), (), Declared("binary")),
        (BinaryCrossEntropy(), (1,), Declared("binary")),
        (Huber(), (3,), Declared("regression", target=(3,))),
        (CrossEntropy(), (5, 7), Declared(None)),
    ],
)
def test_outputs_that_fit(loss: Loss, shape: tuple[int, ...], data: Any) -> None:
    assert output_problems(loss, shape, data) == []


@dataclass(frozen=True)
class Mean(Loss):
    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, target, reduction="none").sum()

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return 2.0**0.5


@dataclass(frozen=True)
class Raises(Mean):
    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits @ logits.new_ones(4711)


@pytest.mark.parametrize(("loss", "expected"), [(Mean(), "one number for each example"), (Raises(), "4711")])
def test_a_step_that_fails_is_found_on_made_up_rows(loss: Loss, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"a step fails on 3 made-up rows of shape \(batch, 6\).*{expected}"):
        fit(make_plan(steps=2), module=make_module(loss=loss))


def test_trying_a_step_changes_nothing() -> None:
    """A run whose rows cannot be made up ends with the same bits."""

    class Own(Blobs):
        known = True

        def made_up_batch(self, rows: int) -> Any:
            return super().made_up_batch(rows) if self.known else None

    other = Own()
    other.known = False
    tried, _ = fit(make_plan(), module=make_module(), data=Own())
    other, _ = fit(make_plan(), module=make_module(), data=other)
    pairs = zip(tried.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(m.training for m in tried.network.modules()) == all(m.training for m in other.network.modules())
