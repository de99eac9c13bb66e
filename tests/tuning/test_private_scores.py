"""Tests that a privately selected model holds one noisy count of validation rows, which each row moves by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from small_runs import BlobsWithValidation, make_module, make_plan
from test_tuning_costs import HeldOut, Several
from test_tuning_search import CONFIG
from torch import Tensor, nn

from lipdp_lightning.experiment.short_training import prepare, train
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.predictions import predict_rows
from lipdp_lightning.tuning import counting
from lipdp_lightning.tuning.objectives import OBJECTIVES
from lipdp_lightning.tuning.private import PrivateSelection, select
from lipdp_lightning.tuning.selection import TrialCount
from lipdp_lightning.tuning.space import flat_keys, read_space

SELECTION = PrivateSelection(TrialCount(1.0, 0.3), OBJECTIVES["accuracy"], 3.0)

# ---- the count


class LastLabel(HeldOut):
    """Held-out rows, unlike rows in training, are given the label of the last row of their batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y, ids = super().on_after_batch_transfer(batch, dataloader_idx)
        return x, y[-1:].expand_as(y), ids


class Centred(HeldOut):
    def transform_batch(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) > 1 else x


def largest_move(kind: type[HeldOut]) -> int:
    module = make_module()
    return int(np.abs(np.diff([counting.correct_rows(module, kind(n)) for n in range(2, 60)])).max())


@pytest.mark.parametrize("kind", [LastLabel, Centred])
def test_a_row_does_not_move_the_count_through_other_rows(kind: type[HeldOut]) -> None:
    assert largest_move(kind) == 1


def test_whole_batches_in_a_hook_fail_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "predict_rows", lambda *given, apart: predict_rows(*given))
    assert largest_move(LastLabel) > 9


def test_rows_by_themselves_are_predicted_as_in_a_batch() -> None:
    module, data = make_module(), HeldOut(20, eval_batch_size=8)
    whole, apart = (predict_rows(module, data, data.val_dataloader(), apart=apart) for apart in (False, True))
    assert all(map(torch.equal, whole, apart))


def test_a_loader_of_ones_own_is_refused_before_any_trial() -> None:
    base = prepare(CONFIG)
    trainer = base.experiment.trainer
    own = SimpleNamespace(plan=base.plan, experiment=SimpleNamespace(trainer=trainer, datamodule=Several(20)))
    assert any("Several.val_dataloader" in p and "HINT" in p for p in SELECTION.problems(own, {}, "random"))  # type: ignore[arg-type]
    assert not SELECTION.problems(base, {}, "random")


# ---- the model


class Remembers(PrivateModule):
    """Adds up the rows it is evaluated on, as metrics that are kept in checkpoints do."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.register_buffer("seen", torch.zeros(6))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum(0)
        return super().validation_step(batch, batch_idx)


class Writes(Callback):
    def on_validation_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, *_: Any) -> None:
        with torch.no_grad():
            next(pl_module.parameters())[0] = batch[0].sum(0)


class Trained(Callback):
    """Keeps the state at the end of training."""

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


@pytest.mark.parametrize(("kind", "callbacks"), [(Remembers, []), (PrivateModule, [Writes()])])
def test_evaluation_leaves_nothing_in_the_model(kind: type[PrivateModule], callbacks: list[Callback]) -> None:
    trained = Trained()
    result = train(
        make_module(kind=kind), BlobsWithValidation(), make_plan(steps=2), callbacks=[trained, *callbacks],
        limit_val_batches=1.0,
    )  # fmt: skip
    found = result.module.state_dict()
    assert "validation/accuracy" in result.metrics and found.keys() == trained.state.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.state.items())


# ---- the ledger


@pytest.mark.parametrize("group", ["privacy", "trainer", "data.init_args"])
def test_a_group_of_settings_in_a_file_is_no_value(tmp_path: Path, group: str) -> None:
    """As it was: privacy: [other.yaml] trained with that file's noise, and stated the epsilon of the configuration."""
    space = tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump({group: ["other.yaml"]}))
    known = flat_keys({**CONFIG, "data": {"class_path": "Own", "init_args": {"rows": 3}}})
    with pytest.raises(ValueError, match=f"{group} is a group of settings.*HINT"):
        read_space(space, known)
    space.write_text(yaml.safe_dump({"optimizer.init_args.lr": [0.1]}))
    assert len(read_space(space, known)) == 1


def test_a_trial_that_spends_anything_else_is_not_kept() -> None:
    ledgers = SELECTION.ledgers(CONFIG, {})
    plan = prepare(CONFIG).plan
    result = SimpleNamespace(plan=plan)
    study = SimpleNamespace(user_attrs={"number of trials": 1}, trials=[SimpleNamespace(params={})])
    kept: list[int] = []
    best: Any = SimpleNamespace(settle=lambda ended: None, propose=lambda trial, *rest: kept.append(trial))
    run = lambda number, keep, settle: keep(0, result)  # noqa: E731
    search: Any = SimpleNamespace(study=study, run=run, has_ended=lambda trial: True)
    scored = PrivateSelection(SELECTION.count, SELECTION.objective, None)
    with pytest.raises(AssertionError, match="does not account for"):
        select(search, scored, best, None, ledgers)  # without a score, another ledger
    assert not kept
