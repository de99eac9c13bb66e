"""Epsilon while a run goes on: what is shown, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from small_runs import fit, make_module, make_plan, make_trainer

from lipdp_lightning.accounting.accountants import Spending
from lipdp_lightning.callbacks import PrivacyAccountant, PrivateProgressBar


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass

    name = "rows"
    version = "0"


class Shown(Callback):
    """What the progress bar would show after each step."""

    def __init__(self) -> None:
        self.bar = PrivateProgressBar()
        self.values: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.values.append(self.bar.get_metrics(trainer, pl_module))


@pytest.fixture(scope="module")
def run() -> Any:
    plan = make_plan(steps=8, accountant="pld")
    shown, rows = Shown(), Rows()
    options = {"logger": rows, "log_every_n_steps": 2}
    _, trainer = fit(plan, PrivacyAccountant(), shown, trainer_options=options)
    return plan, trainer, shown, rows


def test_the_bar_shows_an_upper_bound_that_ends_at_the_guarantee(run: Any) -> None:
    plan, _, shown, _ = run
    spending = Spending(plan)
    epsilons = [row["epsilon"] for row in shown.values[1:]]  # a callback sees what was logged before it
    assert epsilons == sorted(epsilons)
    for step, epsilon in enumerate(epsilons, start=2):
        assert spending.exactly(step).epsilon <= epsilon <= spending.guarantee().epsilon
    assert all("v_num" not in row for row in shown.values)


def test_epsilon_is_logged_and_ends_at_the_guarantee(run: Any) -> None:
    plan, _, _, rows = run
    logged = {step: row["privacy/epsilon"] for step, row in rows.rows if "privacy/epsilon" in row}
    assert set(logged) == {0, 2, 4, 6, 8} and logged[0] == 0
    assert logged[8] == Spending(plan).guarantee().epsilon


def test_an_uncertified_run_shows_no_epsilon() -> None:
    shown, rows = Shown(), Rows()
    plan = make_plan(steps=3, scaling="batch_max")
    fit(plan, PrivacyAccountant(), shown, trainer_options={"logger": rows, "log_every_n_steps": 1})
    assert all("epsilon" not in row for row in shown.values)
    assert not any("epsilon" in key for _, row in rows.rows for key in row)


def test_without_the_private_strategy_it_says_so() -> None:
    trainer = make_trainer("auto", PrivacyAccountant())
    with pytest.raises(ValueError, match=r"SingleDeviceStrategy.*HINT"):
        PrivacyAccountant().on_train_start(trainer, make_module())


def test_the_bar_shows_epsilon_at_every_step_though_it_is_logged_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning takes longer to log a number than many a step."""
    plan, shown, logged = make_plan(steps=60, accountant="rdp"), Shown(), []
    module = make_module()
    log = module.log

    def counting(name: str, *arguments: Any, **options: Any) -> None:
        logged.append(name)
        log(name, *arguments, **options)

    monkeypatch.setattr(module, "log", counting)
    _, trainer = fit(plan, PrivacyAccountant(), shown, module=module, trainer_options={"log_every_n_steps": 60})
    epochs = trainer.current_epoch
    assert logged.count("epsilon") <= 20 + epochs < 60
    own, spending = [row["epsilon"] for row in shown.values[1:]], Spending(plan)
    assert own == pytest.approx([spending.shown(step) for step in range(2, 60)] + [spending.guarantee().epsilon])
    assert float(trainer.callback_metrics["epsilon"]) == spending.guarantee().epsilon
