"""The weighed sum of losses in one pass: value and cotangents of the loss's own way, and zero for a bad row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lipdp_lightning.bounds.losses import BinaryCrossEntropy, CrossEntropy, Loss
from lipdp_lightning.layers import weighed_loss
from lipdp_lightning.layers.cotangents import scale_cotangent
from lipdp_lightning.layers.weighed_loss import weighed_sum
from lipdp_lightning.training.clipped_loss import ClippedLoss


def own_way(loss: Loss, logits: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    return loss.per_example(scale_cotangent(logits, factor), target).sum()


def random_rows(rows: int, classes: int, size: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    logits = size * torch.randn(rows, classes, generator=generator)
    return logits, torch.randint(classes, (rows,), generator=generator), torch.rand(rows, generator=generator) + 0.5


def pulled_back(function, loss: Loss, logits: Tensor, target: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    own = logits.clone().requires_grad_()
    total = function(loss, own, target, factor)
    return total.detach(), torch.autograd.grad(total, own)[0]


@pytest.fixture
def no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighed_loss, "loops", lambda: pytest.fail("one pass was taken"))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 20.0])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 2), (0, 3), (257, 10), (3, 1000)])
def test_value_and_cotangents_are_those_of_the_losss_own_way(rows: int, classes: int, temperature: float) -> None:
    logits, target, factor = random_rows(rows, classes)
    loss = CrossEntropy(temperature=temperature)
    total, cotangents = pulled_back(weighed_sum, loss, logits, target, factor)
    expected, exact = pulled_back(own_way, loss, logits.double(), target, factor.double())
    assert total.dtype == cotangents.dtype == torch.float32 and cotangents.shape == logits.shape
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cotangents.double(), exact, rtol=1e-5, atol=1e-6)
    if rows > 1 and classes > 1:  # and the comparison sees factors that are left out
        _, plain = pulled_back(weighed_sum, loss, logits, target, torch.ones(rows))
        assert not torch.allclose(plain.double(), exact, rtol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 7.0])
def test_no_cotangent_exceeds_its_bound(temperature: float) -> None:
    """Logits far apart, where one-hot vectors are told from each other, and ties."""
    loss = CrossEntropy(temperature=temperature)
    for size in (0.0, 1e-30, 1.0, 30.0, 1e6, 1e30):
        for classes in (2, 3, 50):
            logits, target, factor = random_rows(64, classes, size)
            _, cotangents = pulled_back(weighed_sum, loss, logits, target, factor)
            ratio = cotangents.double().norm(dim=1) / (factor.double() * loss.lipschitz((classes,)))
            assert float(ratio.max()) <= 1 + 1e-6
            if size >= 1e6 and classes == 2:
                assert float(ratio.max()) >= 1 - 1e-6, "and it is attained"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["first", "last", "all", "factor"])
def test_a_row_that_is_not_finite_adds_nothing_to_the_gradient(place: str, value: float) -> None:
    logits, target, factor = random_rows(6, 4)
    _, clean = pulled_back(weighed_sum, CrossEntropy(), logits, target, factor)
    {"first": logits[2, :1], "last": logits[2, 3:], "all": logits[2], "factor": factor[2:3]}[place].fill_(value)
    _, found = pulled_back(weighed_sum, CrossEntropy(), logits, target, factor)
    _, expected = pulled_back(own_way, CrossEntropy(), logits, target, factor)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    others = [0, 1, 3, 4, 5]
    assert bool(found.isfinite().all()) and torch.equal(found[others], clean[others])
    if not (value == -math.inf and place in ("first", "last")):  # a class that has probability 0
        assert not bool(found[2].any())


def test_the_cotangent_of_the_sum_multiplies() -> None:
    logits, target, factor = random_rows(5, 3)
    own = logits.requires_grad_()
    (once,) = torch.autograd.grad(weighed_sum(CrossEntropy(), own, target, factor), own)
    (more,) = torch.autograd.grad(weighed_sum(CrossEntropy(), own, target, factor) * 3 / 2, own)
    torch.testing.assert_close(more, once * 1.5)


@pytest.mark.parametrize("label", [-1, 3, 10**12])
def test_a_target_that_is_no_class_is_refused(label: int) -> None:
    logits, target, factor = random_rows(5, 3)
    target[4] = label
    with pytest.raises(IndexError, match="out of bounds"):
        weighed_sum(CrossEntropy(), logits, target, factor)


def test_a_target_that_torch_ignores_is_ignored() -> None:
    logits, target, factor = random_rows(5, 3)
    target[1] = -100
    found, expected = (pulled_back(f, CrossEntropy(), logits, target, factor) for f in (weighed_sum, own_way))
    torch.testing.assert_close(found, expected)
    assert not bool(found[1][1].any())


@dataclass(frozen=True)
class Doubled(CrossEntropy):
    """Computes something else than what it inherits from."""

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return 2 * super().per_example(logits, target)


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(label_smoothing=0.1), CrossEntropy(class_weights=(1.0, 2.0, 0.0)), Doubled(),
        ClippedLoss(CrossEntropy(), 0.5),
    ],
    ids=["smoothed", "weights", "subclass", "clipped"],
)  # fmt: skip
def test_another_loss_takes_its_own_way(loss: Loss) -> None:
    rows = random_rows(5, 3)
    found, expected = (pulled_back(f, loss, *rows) for f in (weighed_sum, own_way))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("no_loop")
def test_other_shapes_layouts_and_dtypes_take_the_losss_own_way() -> None:
    logits, target, factor = random_rows(6, 3)
    for changed in (
        (logits.double(), target, factor.double()), (logits[::2], target[::2], factor[:3]),
        (logits.t().contiguous().t(), target, factor), (torch.randn(6, 3, 4), torch.randint(3, (6, 4)), factor),
        random_rows(4096, 5),
    ):  # fmt: skip
        found, expected = (pulled_back(f, CrossEntropy(), *changed) for f in (weighed_sum, own_way))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    binary = BinaryCrossEntropy(), logits[:, :1].contiguous(), (target % 2).float(), factor
    torch.testing.assert_close(pulled_back(weighed_sum, *binary), pulled_back(own_way, *binary), rtol=0, atol=0)


def test_targets_that_are_not_one_for_each_example_are_refused_by_the_loss() -> None:
    logits, target, factor = random_rows(6, 3)
    with pytest.raises(ValueError, match="batch_size"):
        weighed_sum(CrossEntropy(), logits, target[:5], factor)
