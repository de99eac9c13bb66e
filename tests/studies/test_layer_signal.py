"""The study of signal, noise and slack: its shares multiply, and its sums are those of an independent computation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import make_plan
from torch import nn

from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.data_modules import Digits
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.mechanism.allocation import sum_margin
from lipdp_lightning.studies import layer_signal
from lipdp_lightning.training import PrivateModule

ROOT = Path(__file__).parents[2]
EXAMPLES = 12


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), MaxMin(), nn.Flatten(), nn.Linear(64, 8), MaxMin(), nn.Linear(8, 10))


def measured(scaling: str, **options: Any) -> tuple[PrivateModule, Digits, Any, dict[str, dict[str, Any]]]:
    module = PrivateModule(network(), CrossEntropy(temperature=0.5), input_bound=3.0, input_mode="normalize")
    data = Digits()
    plan = make_plan(dataset_size=data.dataset_size, expected_batch_size=50.0, scaling=scaling, **options)
    rows = layer_signal.measure(module, data, plan, EXAMPLES)
    return module, data, plan, {row["layer"]: row for row in rows}


@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint", "exact"])
def test_shares_multiply_and_stay_below_one(scaling: str) -> None:
    *_, rows = measured(scaling, radius=0.01 if scaling == "exact" else None)
    assert list(rows) == ["0", "3", "5"]
    for row in rows.values():
        assert row["used"] == pytest.approx(row["cotangent"] * row["input"] * row["alignment"], rel=1e-9)
        assert 0 < row["used"] <= row["largest"] <= 1
        assert all(0 < row[name] <= 1 + 1e-6 for name in ("cotangent", "input", "alignment"))
        assert row["signal_to_noise"] == pytest.approx(row["signal"] / row["noise"])
    # a dense layer's gradient is one outer product; a convolution's is a sum over positions
    assert rows["3"]["alignment"] == pytest.approx(1, rel=1e-5) == rows["5"]["alignment"]
    assert rows["0"]["alignment"] < 0.9
    # the input is scaled onto its sphere of radius 3, every pixel is read by 1 to kappa^2 = 4 of 16 patches
    assert math.sqrt(3**2 + 16) / math.sqrt(4 * 3**2 + 16) <= rows["0"]["input"] <= 1


def test_signal_and_noise_are_those_of_a_step_without_scaling() -> None:
    module, data, plan, rows = measured("worst_case")
    x, y, *_ = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    x, y = x[:EXAMPLES], y[:EXAMPLES]
    module.loss.per_example(module(x), y).sum().backward()
    named = dict(module.network.named_parameters())
    deltas = [row["delta"] for row in rows.values()]
    for name, row in rows.items():
        own = [named[f"{name}.{part}"] for part in ("weight", "bias")]
        assert row["signal"] == pytest.approx(math.hypot(*(float(p.grad.norm()) for p in own)) / EXAMPLES, rel=1e-4)
        deviation = plan.noise_multiplier * math.hypot(*deltas) * sum_margin(50)  # allocation global
        expected = deviation * math.sqrt(sum(p.numel() for p in own)) / 50
        assert row["noise"] == pytest.approx(expected, rel=1e-4)


def test_the_command_prints_both_states(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    steps = ["--privacy.epochs", "null", "--privacy.steps", "2", "--privacy.epsilon", "null"]
    quick = [*steps, "--privacy.noise_multiplier", "1", "--trainer.enable_progress_bar", "false"]
    arguments = ["layer_signal", "--config", config, "--examples", "3", *quick]
    monkeypatch.setattr("sys.argv", [*arguments, "--format", "json"])
    layer_signal.main()
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["at initialisation", "after 2 steps"]
    assert found["at initialisation"][0]["signal"] != found["after 2 steps"][0]["signal"] > 0
    monkeypatch.setattr("sys.argv", [*arguments, "--untrained", "--format", "markdown"])
    layer_signal.main()
    text = capsys.readouterr().out
    assert "after" not in text and "| layers.1 | 640 |" in text
