"""What a search is said to cost, against closed forms; and what a noisy score may count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import optimize, stats
from small_runs import Blobs, make_module, make_plan
from test_tuning_search import CONFIG

from lipdp_lightning.cli import main
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.experiment.short_training import beside_training, prepare
from lipdp_lightning.tuning.cost import cost_of
from lipdp_lightning.tuning.counting import correct_rows
from lipdp_lightning.tuning.objectives import OBJECTIVES
from lipdp_lightning.tuning.private import PrivateSelection
from lipdp_lightning.tuning.selection import TrialCount, selection_epsilon
from lipdp_lightning.tuning.space import Choice

NOISE, STEPS, DELTA = 20.0, 12, 1e-3


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Balle and Wang 2018: the exact epsilon of N(0, 1) against N(mu, 1)."""

    def excess(e: float) -> float:
        return float(stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)) - delta

    return float(optimize.brentq(excess, 0.0, mu**2 / 2 + 20 * mu))


def trials_of(plan: Any, count: int) -> list[Any]:
    """Trials of equal ledgers, as a study holds them."""
    events = [vars(event) for event in plan.events()]
    return [SimpleNamespace(user_attrs={"events": [dict(e) for e in events]}) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_trials_of_equal_ledgers_all_count(count: int) -> None:
    """On the full batch, all steps of all trials are one Gaussian release."""
    plan = make_plan(expected_batch_size=60, noise_multiplier=NOISE, accountant="pld", delta=DELTA)
    cost = cost_of(trials_of(plan, count), plan, certified=True)
    alone = gaussian_epsilon(math.sqrt(STEPS) / NOISE, DELTA)
    assert cost.trials == count and cost.summed_delta == pytest.approx(count * DELTA)
    assert count * alone <= cost.summed * (1 + 1e-6) <= 1.01 * count * alone
    together = gaussian_epsilon(math.sqrt(count * STEPS) / NOISE, DELTA)
    assert together <= cost.composed <= 1.3 * together


def test_what_callbacks_release_beside_the_ledger_counts_too() -> None:
    plan = make_plan(expected_batch_size=60, noise_multiplier=NOISE, accountant="pld", delta=DELTA)
    plain, trials = cost_of(trials_of(plan, 3), plan, certified=True), trials_of(plan, 3)
    for trial in trials:
        trial.user_attrs["beside training"] = 0.5
    cost = cost_of(trials, plan, certified=True)
    assert cost.summed == pytest.approx(plain.summed + 1.5) and cost.composed == pytest.approx(plain.composed + 1.5)


def test_the_epsilon_of_a_trial_holds_that_of_its_temperature() -> None:
    scaling = {"class_path": "callbacks.TemperatureScaling", "init_args": {"epsilon": 0.5}}
    base = prepare(CONFIG | {"trainer": {**CONFIG["trainer"], "callbacks": [scaling]}})
    assert beside_training(base.experiment.trainer) == 0.5


def by_hand(noises: list[float], count: TrialCount, delta: float) -> float:
    """Papernot and Steinke's theorem for Gaussians on all rows, whose divergence of order a is a / 2 sum 1/s^2."""
    rho = sum(1 / s**2 for s in noises) / 2
    b = np.arange(1.001, 500, 0.01)
    penalty = math.log(1 / count.gamma)
    second = min(float(((1 + count.eta) * (1 - 1 / b) * b * rho + (1 + count.eta) * penalty / b).min()), 2 * penalty)
    a = np.arange(1.05, 300, 0.05)
    renyi = a * rho + second + math.log(count.mean()) / (a - 1)
    return float((renyi + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)).min())


@pytest.mark.parametrize("score_noise", [None, 3.0, 30.0])
def test_a_noisy_score_is_paid_for_with_the_training(score_noise: float | None) -> None:
    privacy = CONFIG["privacy"] | {"batch_size": prepare(CONFIG).plan.dataset_size, "noise_multiplier": 8.0, "steps": 4}
    selection = PrivateSelection(TrialCount(1.0, 0.2), OBJECTIVES["accuracy"], score_noise)
    space: Any = {"optimizer.init_args.lr": Choice((0.1, 0.2))}
    ledgers = selection.ledgers(CONFIG | {"privacy": privacy}, space)
    epsilon = selection_epsilon(ledgers, selection.count, DELTA)
    noises = [8.0] * 4 + ([] if score_noise is None else [score_noise])
    assert epsilon == pytest.approx(by_hand(noises, selection.count, DELTA), rel=0.02)


# ---- the score itself


class HeldOut(Blobs):
    """Validation rows in a chosen number, none of them published."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__(**options)
        self.held_out = rows

    def load_validation(self) -> Any:
        x, y = self._rows(100, 2)
        return x[: self.held_out], y[: self.held_out]


@pytest.mark.parametrize("batch", [1, 7, 1024])
def test_one_row_moves_the_count_by_at_most_one(batch: int) -> None:
    module = make_module()
    counts = [correct_rows(module, HeldOut(n, eval_batch_size=batch)) for n in range(1, 60)]
    assert set(np.diff(counts)) == {0, 1}
    x, y = HeldOut(59)._rows(100, 2)
    with torch.no_grad():
        assert counts[-1] == int((module(x[:59]).argmax(1) == y[:59]).sum())


class Twice(HeldOut):
    def val_dataloader(self) -> Any:
        loader = super().val_dataloader()
        return _Loader([*loader, *loader], loader.dataset)


class LeavesOut(HeldOut):
    def val_dataloader(self) -> Any:
        loader = super().val_dataloader()
        return _Loader(list(loader)[:-1], loader.dataset)


class Several(HeldOut):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]


class _Loader:
    def __init__(self, batches: list[Any], dataset: Any) -> None:
        self.batches, self.dataset = batches, dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Twice, "gives 40 validation rows, 20 of them different, out of 20"),
        (LeavesOut, "gives 16 validation rows, 16 of them different, out of 20"), (Several, "has 2 validation loaders"),
    ],
)  # fmt: skip
def test_loaders_that_do_not_give_every_row_once_are_refused(kind: type[PrivateDataModule], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        correct_rows(make_module(), kind(20, eval_batch_size=8))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit_val_batches", "0.1"), ("limit_val_batches", "0"), ("overfit_batches", "2"),
        ("overfit_batches", "0.5"), ("fast_dev_run", "true"),
    ],
)  # fmt: skip
def test_options_that_change_which_rows_are_scored_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    arguments = ["--config", str(config), "--out", str(tmp_path / "out"), "--private-selection", "geometric"]
    code = main(["tune", *arguments, "--score-noise", "5", f"--trainer.{option}", value])
    said = capsys.readouterr().err
    assert code == 2 and f"trainer.{option}" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_callback_that_spends_beside_the_ledger_is_refused() -> None:
    curves = {"class_path": "callbacks.PrivateValidationCurves", "init_args": {"epsilon": 0.5}}
    base = prepare(CONFIG | {"trainer": {**CONFIG["trainer"], "callbacks": [curves]}})
    found = PrivateSelection(TrialCount(1.0, 0.2), OBJECTIVES["accuracy"], 5.0).problems(base, {}, "random")
    assert any("PrivateValidationCurves spends an epsilon" in problem for problem in found)
