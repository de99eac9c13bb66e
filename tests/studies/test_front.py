"""The comparison on trained convolutions: lipdp_lightning/studies/front.py and exact_cost.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from lipdp_lightning.experiment.experiment import parse_experiment
from lipdp_lightning.experiment.short_training import merged
from lipdp_lightning.studies import exact_cost, front

ROOT = Path(__file__).parents[2]


def options_of(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    chosen = {
        "output": str(tmp_path / "front.jsonl"),
        "methods": list(front.METHODS),
        "config": str(ROOT / front.CONFIG),
    }
    return argparse.Namespace(**chosen | {"epochs": 1.0, "epsilon": 2.0, "seeds": [1, 2]} | changes)


def test_every_method_gets_as_many_settings() -> None:
    assert {len(settings) for _, settings in front.METHODS.values()} == {4}
    for _, settings in front.METHODS.values():
        assert all(settings.count(s) == 1 for s in settings)


@pytest.mark.parametrize("method", front.METHODS)
def test_settings_are_configurations_of_the_same_network_and_budget(method: str, tmp_path: Path) -> None:
    import yaml

    own = merged(ROOT / front.CONFIG, {})
    for i, setting in enumerate(front.METHODS[method][1][:2]):
        content = merged(ROOT / front.CONFIG, front.METHODS[method][0] | setting)
        for group in ("privacy.epsilon", "privacy.epochs", "privacy.batch_size", "privacy.delta"):
            key = group.partition(".")[2]
            assert content["privacy"][key] == own["privacy"][key]
        file = tmp_path / f"{i}.yaml"
        file.write_text(yaml.safe_dump(content))
        plan = parse_experiment(["--config", str(file)], None, "off").plan
        assert plan.certified and plan.scaling == {"exact": "exact", "flat": "clip_ghost", "bounds": "joint"}[method]


def test_the_setting_is_chosen_on_held_out_rows_and_judged_on_others(tmp_path: Path, monkeypatch: Any) -> None:
    """And a second call trains nothing."""
    trained: list[tuple[Any, int]] = []

    def train(setting: Any, seed: int, options: Any) -> dict[str, Any]:
        trained.append((setting[front.RATE], seed))
        # the best on held-out rows is not the best on test rows
        worth = setting[front.RATE] if seed in front.SEARCH_SEEDS else 1 - setting[front.RATE] + seed / 100
        return {"accuracy": 100 * worth, "epsilon": 2.0}

    monkeypatch.setattr(front, "train", train)
    options = options_of(tmp_path, methods=["exact"])
    (row,) = front.compare(options)
    best = max(s[front.RATE] for s in front.METHODS["exact"][1])
    assert row["chosen"][front.RATE] == best
    assert row["test"] == pytest.approx(100 * (1 - best + 0.015))
    assert [seed for _, seed in trained] == [*front.SEARCH_SEEDS] * 4 + [1, 2]
    assert front.compare(options) == [row] and len(trained) == 10
    front.compare(options_of(tmp_path, methods=["exact"], epochs=2.0))
    assert len(trained) == 20  # another budget is another training


def test_costs_are_measured_against_the_step_without_scaling(monkeypatch: Any) -> None:
    name = next(iter(exact_cost.NETWORKS))
    monkeypatch.setattr(exact_cost, "NETWORKS", {name: exact_cost.NETWORKS[name]})
    (row,) = exact_cost.measure(rows=64, repeats=2)
    assert row[0] == name and all(float(ratio) > 0 for ratio in row[1:4])
    # (784 + 1152) inputs, (1152 + 10) outputs
    assert float(row[4]) == pytest.approx(1 + 1162 / 1936, abs=0.06)
