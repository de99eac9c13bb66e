"""Signal and noise of a step, estimated from what was released."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from small_runs import fit, make_module, make_plan

from lipdp_lightning.callbacks import GradientNoiseMonitor, PrivacyReport


def test_the_noise_it_states_is_the_noise_that_is_there() -> None:
    """With noise far above the signal, the released norm is the noise's; the estimate of the signal stays below."""
    monitor = GradientNoiseMonitor(every_n_steps=1)
    plan = make_plan(steps=10, noise_multiplier=50.0)
    _, trainer = fit(plan, monitor)
    assert [row["step"] for row in monitor.history] == list(range(10))
    for group in trainer.strategy.mechanism.certificate.groups:
        for row in monitor.history:
            # chi-square: within five standard deviations of the mean
            assert row[f"signal/{group.name}"] <= row[f"noise/{group.name}"] * (5 * math.sqrt(2 / group.numel)) ** 0.5


def test_without_noise_the_signal_is_the_gradient_norm() -> None:
    monitor = GradientNoiseMonitor(every_n_steps=2)
    _, trainer = fit(make_plan(steps=4, noise_multiplier=0.0), monitor)
    assert [row["step"] for row in monitor.history] == [0, 2]
    last = monitor.history[-1]
    assert last["gradient_to_noise"] == 0.0 and all(last[k] == 0 for k in last if k.startswith("noise/"))
    assert all(last[k] > 0 for k in last if k.startswith("signal/"))
    assert len(last) == 2 + 2 * len(trainer.strategy.mechanism.certificate.groups)


def test_names_of_layers_reach_logs_as_visible_text(tmp_path: Path) -> None:
    odd = "a\x1b[2J\x9b31m\u202e\x07b"
    shown: list[str] = []
    network = torch.nn.Sequential(OrderedDict({odd: torch.nn.Linear(6, 3)}))

    class Tables(CSVLogger):
        def log_table(self, key: str, columns: list[str], data: list[list[Any]]) -> None:
            shown.extend(cell for row in data for cell in row if isinstance(cell, str))

    logger, report = Tables(tmp_path), PrivacyReport(tmp_path)
    monitor = GradientNoiseMonitor(every_n_steps=1)
    _, trainer = fit(
        make_plan(steps=2), monitor, report, module=make_module(network=network), trainer_options={"logger": logger}
    )
    report.write(trainer, trainer.lightning_module)
    report.publish(trainer)
    logger.finalize("success")
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "gradient/noise/a" in text and all(c.isprintable() or c == "\n" for c in text)
    assert shown and all(text.isprintable() for text in shown)


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="HINT"):
        GradientNoiseMonitor(every_n_steps=0)
