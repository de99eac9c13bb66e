"""Tests that modules and callbacks of Lightning's users work beside a private step, or are refused in one message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner import Tuner
from projects import WITHOUT_FILES
from small_projects import Project, all_weights, fit, held_out, loader, privatize, rows
from small_runs import SECRET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lipdp_lightning.adoption import faithful_copy
from lipdp_lightning.bounds.losses import Huber


class Keeps(Project):
    """Keeps something in the training step, as its subclasses read it again."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: Any = []
        self.train_acc = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.outs.append(loss.detach())
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_epoch=True)
        return loss


class Averages(Keeps):
    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.stack(list(self.outs)).mean())
        self.outs.clear()


class Computes(Keeps):
    def on_train_epoch_end(self) -> None:
        for value in [self.train_acc.compute() for _ in range(1)]:  # in a scope of its own
            self.log("train_acc", value)


class Bounded(Averages):
    def __init__(self) -> None:
        super().__init__()
        self.outs = deque(maxlen=3)


class Meter:
    """A mean that somebody has written by hand."""

    total = 0.0

    def append(self, loss: Tensor) -> None:
        self.total += float(loss)


class ByHand(Averages):
    def __init__(self) -> None:
        super().__init__()
        self.outs = Meter()


@pytest.mark.parametrize(
    ("kind", "name"), [(Averages, "outs"), (Computes, "train_acc"), (Bounded, "outs"), (ByHand, "outs")]
)
def test_a_hook_that_reads_what_the_step_keeps_is_refused(kind: type[Project], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.on_train_epoch_end reads {name}, which.*HINT.*validation"):
        privatize(kind())


def test_without_the_check_such_a_metric_would_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithful_copy, "read_in_training", lambda *_: [])
    assert float(fit(privatize(Computes())).callback_metrics["train_acc"]) == 0.0


def test_what_the_step_keeps_and_nobody_reads_is_told() -> None:
    private = privatize(Keeps())
    assert any("keeps stays as it is, since it does not run: outs, train_acc" in note for note in private.notes)
    assert "train_acc" not in fit(private).callback_metrics
    assert not any("keeps" in note for note in privatize().notes)


class Autoencoder(Project):
    def __init__(self, loss: Callable[..., Tensor], flat: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 6))
        self.loss, self.flat = loss, flat

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        return self.loss(self(x), x.view(len(x), -1) if self.flat else x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[0]))


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.l1_loss])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_an_autoencoder_has_its_rows_as_targets(loss: Callable[..., Tensor], labels: bool, flat: bool) -> None:
    x, y = rows()
    given = DataLoader(TensorDataset(x.sigmoid(), *([y] if labels else [])), batch_size=20)
    private = privatize(Autoencoder(loss, flat), given)
    assert fit(private).global_step == 12
    batch = x.sigmoid()
    mean = private.module.loss.per_example(private.module.network(batch), batch).mean()
    torch.testing.assert_close(mean, loss(private.module.network(batch), batch))


def test_an_autoencoder_with_the_squared_error_is_told_its_loss() -> None:
    with pytest.raises(ValueError, match=r"MSELoss has no Lipschitz constant.*HINT"):
        privatize(Autoencoder(F.mse_loss))
    private = privatize(Autoencoder(F.mse_loss), loss="huber")
    assert isinstance(private.module.loss, Huber) and fit(private).global_step == 12


class Tasks(Project):
    """Two losses, on outputs of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + 0.3 * F.smooth_l1_loss(self.other(x).squeeze(1), y.float())


def test_two_tasks_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"a sum of several losses.*HINT.*subclass"):
        privatize(Tasks())
    with pytest.raises(ValueError, match=r"several loss functions.*\(cross_entropy, smooth_l1_loss\).*HINT"):
        privatize(Tasks(), loss="cross_entropy")


class Recurrent(Project):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(x.view(-1, 3, 2))[0][:, -1])
        return logits


class Borrowed(Project):
    """Reads the weight of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


def test_parts_with_several_results_belong_to_the_network() -> None:
    with pytest.raises(ValueError, match=r"cell: torch\.nn\.LSTM: recurrent layers.*HINT"):
        privatize(Recurrent())
    with pytest.raises(ValueError, match=r"do not make a network by themselves: AttributeError.*HINT"):
        privatize(Borrowed())


class Attention(Project):
    """A part that is given several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 2)
        logits: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))
        return logits


def test_parts_with_several_arguments_belong_to_the_network() -> None:
    """The attention of torch is trained or refused by its name, and is not lost on the way."""
    try:
        private = privatize(Attention())
    except ValueError as error:
        assert "attention" in str(error) and "HINT" in str(error)
    else:
        assert any("attention" in name for name, _ in private.module.network.named_parameters())


def test_callbacks_that_average_weights_work_and_those_that_thaw_layers_are_refused() -> None:
    for callback in (StochasticWeightAveraging(1e-2), EMAWeightAveraging(decay=0.5)):
        trainer = fit(privatize(), callback, held_out=held_out())
        assert trainer.global_step == 12 and bool(all_weights(trainer.lightning_module).isfinite().all())
    with pytest.raises(ValueError, match=r"SpikeDetection decides by the loss.*HINT"):
        fit(privatize(), SpikeDetection())

    class Thaws(Project):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]

    with pytest.raises(ValueError, match=r"changed after set-up.*HINT"):
        fit(privatize(Thaws()), BackboneFinetuning(unfreeze_backbone_at_epoch=1))


def test_a_search_for_a_learning_rate_takes_no_step() -> None:
    class Rated(Project):
        lr = 0.1

    private = privatize(Rated())
    trainer = private.Trainer(**WITHOUT_FILES)
    trainer.strategy.fixed_secret = SECRET
    with pytest.raises(ValueError, match=r"LearningRateFinder searches on the private data.*HINT"):
        Tuner(trainer).lr_find(private.module, datamodule=private.data, num_training=5)
    assert trainer.strategy.mechanism is None and trainer.global_step == 0


@pytest.mark.parametrize(
    "options", [{"barebones": True, "logger": None, "log_every_n_steps": None}, {"log_every_n_steps": 0}]
)
def test_a_trainer_that_logs_nothing_trains(options: dict[str, Any]) -> None:
    assert fit(privatize(), **options).global_step == 12


def test_the_projects_own_loader_is_named_where_it_is_given_to_fit() -> None:
    private = privatize()
    with pytest.raises(ValueError, match=r"the data is a DataLoader as it was before privatize.*HINT"):
        private.Trainer(**WITHOUT_FILES).fit(private.module, loader(), held_out())
