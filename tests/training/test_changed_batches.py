"""The network sees the batch that the sampler drew: what changes it on its way is refused, or has no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, Gradients, fit, make_module, make_plan, weights
from torch import Tensor

from lipdp_lightning.training import PrivateModule, PrivateStrategy

Change = Callable[[Any], Any]


class InBatch(Callback):
    """Changes the batch of the second step before it reaches the network."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.change(batch)


def _replaced_data(batch: Any) -> None:
    batch[0].data = batch[0].flip(0) * 2


def _through_numpy(batch: Any) -> None:
    batch[0].numpy()[:] = 1.0


CHANGES: dict[str, Change] = {
    "rows scaled": lambda batch: batch[0].mul_(100),
    "rows mixed": lambda batch: batch[0].add_(batch[0].flip(0)),
    "one entry": lambda batch: batch[0][0, 0].add_(1e-3),
    "rows through .data": lambda batch: batch[0].data.mul_(100),
    "storage replaced": _replaced_data,
    "rows through numpy": _through_numpy,
    "rows taken away": lambda batch: batch[0].resize_(1, 6),
    "labels": lambda batch: batch[1].fill_(0),
    "labels permuted through .data": lambda batch: batch[1].data.copy_(batch[1].roll(1)),
    "ids": lambda batch: batch[2].add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_that_a_callback_changes_is_not_released(name: str) -> None:
    seen = Gradients()
    with pytest.raises(ValueError, match=r"batch.*changed.*HINT"):
        fit(make_plan(steps=3), InBatch(CHANGES[name]), seen)
    assert len(seen.before_step) == 1


class ChangesItsBatches(PrivateModule):
    """Changes a batch in the module's own hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1:
            batch[0].mul_(100)


def test_a_batch_that_the_module_changes_is_not_released() -> None:
    seen = Gradients()
    with pytest.raises(ValueError, match=r"batch.*changed.*HINT"):
        fit(make_plan(steps=3), seen, module=make_module(kind=ChangesItsBatches))
    assert len(seen.before_step) == 1


def test_what_a_hook_keeps_of_a_batch_is_not_what_the_network_sees() -> None:
    """A write that comes later than the comparison does not reach the loss either."""
    kept: list[Tensor] = []

    class Later(InBatch):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            kept.append(batch[0])

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            kept[-1].data.mul_(100)

    expected = weights(fit(make_plan(steps=3))[0])
    assert torch.equal(weights(fit(make_plan(steps=3), Later(lambda batch: None))[0]), expected)


class NotFinite(Blobs):
    """Large entries become NaN."""

    def transform_batch(self, x: Tensor) -> Tensor:
        return torch.where(x > 1.2, float("nan"), x)


def test_rows_that_are_not_finite_are_no_change() -> None:
    data = NotFinite()
    _, trainer = fit(make_plan(steps=3), data=data)
    assert trainer.global_step == 3
    assert data.transform_batch(data.load_train()[0]).isnan().any()


# ---- data modules with transfers of their own


def own_transfer(name: str, change: Callable[[Any, Any], Any]) -> Blobs:
    def method(self: Any, batch: Any, *args: Any) -> Any:
        return change(self, getattr(super(type(self), self), name)(batch, *args))

    return type("Own", (Blobs,), {name: method})()


def _memory(self: Any, batch: Any) -> Any:
    before, self.before = getattr(self, "before", 0.0), batch[0].sum()
    return (batch[0] + before, *batch[1:])


MIXING: dict[str, Callable[[Any, Any], Any]] = {
    "mean of the batch": lambda self, b: (b[0] - b[0].mean(0), *b[1:]),
    "mix-up": lambda self, b: ((b[0] + b[0].flip(0)) / 2, *b[1:]),
    "every row twice": lambda self, b: tuple(torch.cat([t, t]) for t in b),
    "labels of others": lambda self, b: (b[0], b[1].roll(1), b[2]),
    "ids of others": lambda self, b: (b[0], b[1], torch.zeros_like(b[2])),
    "a row left out": lambda self, b: tuple(t[1:] for t in b),
    "rows of before": _memory,
    "noise by position": lambda self, b: (b[0] + torch.rand_like(b[0]), *b[1:]),
    "the size of the batch": lambda self, b: (b[0] * len(b[0]), *b[1:]),
    "another number of tensors": lambda self, b: b[:2],
}
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@pytest.mark.parametrize("method", TRANSFERS)
@pytest.mark.parametrize("name", MIXING)
def test_a_transfer_that_mixes_examples_is_refused_in_set_up(name: str, method: str) -> None:
    seen = Gradients()
    with pytest.raises(ValueError, match=r"Own.*(batch|row).*HINT"):
        fit(make_plan(steps=2), seen, data=own_transfer(method, MIXING[name]))
    assert not seen.before_step


def test_a_transform_that_mixes_examples_is_refused_in_set_up() -> None:
    class Centred(Blobs):
        def transform_batch(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with pytest.raises(ValueError, match=r"Centred.*row.*HINT"):
        fit(make_plan(steps=2), data=Centred())


@pytest.mark.parametrize("method", TRANSFERS)
def test_a_transfer_that_treats_each_row_alone_trains(method: str) -> None:
    data = own_transfer(method, lambda self, b: (b[0] / 2, *b[1:]))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    _, trainer = fit(make_plan(steps=2), data=data)
    torch.set_rng_state(state)
    assert trainer.global_step == 2


# ---- Strategies with steps of their own

STEP = ("training_step", "backward", "optimizer_step", "batch_to_device", "step_key", "dropout_key")


@pytest.mark.parametrize("name", STEP)
def test_a_strategy_with_its_own_method_of_the_step_is_refused(name: str) -> None:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), name)(*args, **kwargs)

    kind = type("Own", (PrivateStrategy,), {name: method})
    with pytest.raises(ValueError, match=rf"Own\.{name}.*HINT"):
        fit(make_plan(steps=1), strategy_kind=kind)


def test_a_method_of_the_step_on_a_strategys_instance_is_refused() -> None:
    class Own(PrivateStrategy):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.backward = lambda loss, *rest, **more: loss.backward()  # type: ignore[method-assign]

    with pytest.raises(ValueError, match=r"Own\.backward.*HINT"):
        fit(make_plan(steps=1), strategy_kind=Own)


def test_a_strategy_that_only_looks_on_trains() -> None:
    class Looks(PrivateStrategy):
        steps = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            type(self).steps += 1

        def teardown(self) -> None:
            super().teardown()

    _, trainer = fit(make_plan(steps=2), strategy_kind=Looks)
    assert trainer.global_step == 2 and Looks.steps == 2
