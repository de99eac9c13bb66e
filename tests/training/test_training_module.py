"""What a PrivateModule logs, and what it keeps to itself."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from small_runs import Blobs, fit, make_module, make_network, make_plan, make_trainer
from torch import Tensor, nn

from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.bounds.losses import Huber
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.module import ClippedLoss


def logged(directory: Path) -> set[str]:
    with open(directory / "logs" / "metrics.csv") as file:
        return set(next(csv.reader(file)))


def train(tmp_path: Path, **options: Any) -> Any:
    trainer_options = {
        "logger": CSVLogger(tmp_path, name="", version="logs"), "log_every_n_steps": 1, "limit_val_batches": 1.0,
    }  # fmt: skip
    return fit(make_plan(steps=3), module=make_module(**options), trainer_options=trainer_options)


def test_nothing_about_training_rows_is_logged(tmp_path: Path) -> None:
    _, trainer = train(tmp_path)
    assert logged(tmp_path) == {"epoch", "step", "validation/loss", "validation/accuracy"}
    assert set(trainer.callback_metrics) == {"validation/loss", "validation/accuracy"}


def test_the_training_loss_is_logged_on_request_and_only_under_nonprivate(tmp_path: Path) -> None:
    _, trainer = train(tmp_path, log_nonprivate=True)
    assert logged(tmp_path) - {"epoch", "step", "validation/loss", "validation/accuracy"} == {"nonprivate/loss"}
    assert trainer.callback_metrics["nonprivate/loss"] > 0


def test_held_out_metrics_are_those_of_the_model() -> None:
    module, _ = fit(make_plan(steps=3))
    trainer = make_trainer("auto", limit_val_batches=1.0)
    data = Blobs()
    data.eval_batch_size = 7
    found = trainer.test(module, datamodule=data, verbose=False)[0]
    x, y = data.load_test()
    module.eval()
    with torch.no_grad():
        logits = module(x)
    assert found["test/accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    assert found["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)


class Targets(Blobs):
    task = "regression"
    target_bound = 1.0

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x, (y.float() - 1) / 2


class Labels(Blobs):
    task = "binary"

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x, (y > 0).long()


@pytest.mark.parametrize(
    ("data", "loss", "metric"), [(Targets, Huber(0.5), "mae"), (Labels, "binary_cross_entropy", "accuracy")]
)
def test_other_tasks_train_and_report_their_metric(data: type[Blobs], loss: Any, metric: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    module = make_module(network=network, loss=loss)
    _, trainer = fit(make_plan(steps=3), module=module, data=data(), trainer_options={"limit_val_batches": 1.0})
    assert 0 <= float(trainer.callback_metrics[f"validation/{metric}"]) <= 1


def test_training_without_noise_learns() -> None:
    """The control of every private run: the same path with noise 0 finds the clusters."""
    module, trainer = fit(make_plan(steps=200, noise_multiplier=0.0), module=make_module(rate=0.1))
    found = make_trainer("auto").test(module, datamodule=Blobs(), verbose=False)[0]
    assert found["test/accuracy"] > 0.95
    assert trainer.strategy.plan.certified is False


def test_the_clipped_loss_does_not_nest_and_can_be_taken_away() -> None:
    module = make_module()
    plain = module.loss
    module.clip_loss(0.5)
    module.clip_loss(0.25)
    assert isinstance(module.loss, ClippedLoss) and module.loss.loss is plain and module.loss.radius == 0.25
    module.clip_loss(None)
    assert module.loss is plain


def test_a_step_outside_the_private_strategy_is_refused() -> None:
    class Careless(PrivateModule):
        def configure_callbacks(self) -> Any:
            return []  # without the first guard

    trainer = make_trainer("auto")
    module = Careless(make_network(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    data = Blobs()
    data.bind(lambda step, chunk: torch.arange(4), 3, 1, lambda: 0)
    with pytest.raises(ValueError, match=r"would release raw gradients.*HINT"):
        trainer.fit(module, datamodule=data)


def test_dropout_of_an_example_does_not_depend_on_the_others() -> None:
    masks: list[dict[int, Tensor]] = []

    def record(layer: Any, inputs: Any, output: Tensor) -> None:
        if layer.training:
            ids = layer.context[1].tolist()
            masks.append(dict(zip(ids, (output.detach() != 0) | (inputs[0].detach() == 0), strict=True)))

    def run(rows: int) -> dict[int, Tensor]:
        torch.manual_seed(0)
        module = make_module(network=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))

        class Listen(Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                pl_module.network[1].register_forward_hook(TrustedHook(record))

        class Fewer(Blobs):
            def load_train(self) -> tuple[Tensor, Tensor]:
                x, y = super().load_train()
                return x[:rows], y[:rows]

        masks.clear()
        fit(make_plan(steps=1), Listen(), module=module, data=Fewer())
        return masks[0]

    whole, without_last = run(60), run(58)
    common = [i for i in whole if i in without_last]
    assert len(common) > 10 and all(torch.equal(whole[i], without_last[i]) for i in common)
    assert len({tuple(m.tolist()) for m in whole.values()}) > len(whole) // 2
