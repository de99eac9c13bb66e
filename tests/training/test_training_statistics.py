"""Statistics released before the first step, through a Trainer: once per run, accounted for, with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Blobs, Crash, make_module, make_plan, make_trainer, weights
from statistic_runs import MEANS, MeanBlobs, mean_plan, mean_session, mean_strategy

from lipdp_lightning.callbacks import PrivacyReport, ResumeCheckpoint
from lipdp_lightning.privacy.statistics import Statistics
from lipdp_lightning.training.checkpoints import STATISTICS, restore_statistics

LAST = Path("checkpoints") / "last.ckpt"


def crash(directory: Path, step: int, every: int = 3, **options: Any) -> MeanBlobs:
    data = MeanBlobs()
    keeper = ResumeCheckpoint(directory / "checkpoints", every_n_steps=every)
    with pytest.raises(InterruptedError):
        mean_session(directory, Crash(step), keeper, data=data, **options)
    return data


def go_on(directory: Path, **options: Any) -> Any:
    checkpoint = directory / LAST
    return mean_session(directory, checkpoint=checkpoint if checkpoint.exists() else None, **options)


def ends_alike(directory: Path, **options: Any) -> bool:
    """Whether a run that is interrupted and continued uses one release, and ends with the bits of one that is not."""
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    whole, _, first = mean_session(directory / "a")
    interrupted = crash(directory / "b", 7)
    module, _, second = go_on(directory / "b", **options)
    looks = first.looks == 2 and interrupted.looks == 2 and second.looks == 0
    same = all(torch.equal(first.used[label], second.used[label]) for label, _ in MEANS)
    return looks and same and torch.equal(weights(whole), weights(module))


def test_a_continued_run_uses_the_values_it_has_released(tmp_path: Path) -> None:
    assert ends_alike(tmp_path)


def test_a_run_that_computes_them_anew_fails_the_same_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Statistics.settle

    def anew(self: Statistics, plan: Any, terms: Any, saved: Any, started: bool, secret: bytes) -> Any:
        self._path = None
        return settle(self, plan, terms, None, False, secret)

    monkeypatch.setattr(Statistics, "settle", anew)
    assert not ends_alike(tmp_path)


def test_a_new_branch_uses_them_too(tmp_path: Path) -> None:
    """Other data is another branch with noise of its own; what was released before the first step stays."""
    budget = {"plan": mean_plan(steps=120), "trainer": {"max_steps": 12}}
    interrupted = crash(tmp_path, 7, **budget)
    _, trainer, data = go_on(tmp_path, data=MeanBlobs(shift=0.5), **budget)
    assert trainer.strategy.branches.count == 2 and data.looks == 0  # type: ignore[attr-defined]
    assert interrupted.used.keys() == data.used.keys()


def test_lost_statistics_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):  # before there is a checkpoint
        mean_session(tmp_path, Crash(2))
    (tmp_path / "statistics.npz").unlink()
    data = MeanBlobs()
    with pytest.raises(ValueError, match="are lost"):
        go_on(tmp_path, data=data)
    assert data.looks == 0


def test_a_checkpoint_brings_them_back(tmp_path: Path) -> None:
    interrupted = crash(tmp_path, 7)
    (tmp_path / "statistics.npz").unlink()
    _, _, data = go_on(tmp_path)
    assert data.looks == 0 and (tmp_path / "statistics.npz").exists()
    assert torch.equal(data.used["mean of rows"], interrupted.used["mean of rows"])


def test_two_directories_are_two_releases(tmp_path: Path) -> None:
    used = []
    for name in "ab":
        (tmp_path / name).mkdir()
        _, _, data = mean_session(tmp_path / name, fixed_secret=None)
        used.append(data.used["mean of rows"])
    assert not torch.equal(*used)
    # and the second does not take over the first one's weights with a release of its own
    (tmp_path / "c").mkdir()
    crash(tmp_path / "c", 7)
    with pytest.raises(ValueError, match="second release"):
        mean_session(tmp_path / "b", checkpoint=tmp_path / "c" / LAST)


@pytest.mark.parametrize(
    ("data", "plan"),
    [
        (MeanBlobs(), make_plan()),
        (MeanBlobs(), make_plan(preliminary=(("mean of rows", 5.0), ("mean of squares", 8.1)))),
        (MeanBlobs(), make_plan(preliminary=MEANS[:1])),
        (Blobs(), mean_plan()),
    ],
    ids=["no entry", "another noise", "one of two", "nothing to release"],
)
def test_a_plan_that_does_not_account_for_what_is_released_is_refused(tmp_path: Path, data: Any, plan: Any) -> None:
    with pytest.raises(ValueError, match=r"releases the statistics .* plan accounts for .*HINT"):
        mean_session(tmp_path, data=data, plan=plan)
    assert getattr(data, "looks", 0) == 0 and not list(tmp_path.iterdir())


def test_units_that_are_drawn_as_one_row_are_refused(tmp_path: Path) -> None:
    class Grouped(MeanBlobs):
        @property
        def samples_groups(self) -> bool:
            return True

    with pytest.raises(ValueError, match="draws groups, and a statistic sums all rows of a group"):
        mean_session(tmp_path, data=Grouped())


def test_the_report_lists_them(tmp_path: Path) -> None:
    _, trainer, _ = mean_session(tmp_path, PrivacyReport(tmp_path / "report"))
    report = json.loads((tmp_path / "report" / "privacy_report.json").read_text())
    entries = [(e["label"], e["mechanism"], e["noise_multiplier"], e["count"]) for e in report["ledger"]]
    assert entries[:2] == [(label, "gaussian", level, 1) for label, level in MEANS]
    assert entries[2][0] == "gradient" and entries[2][3] == 12
    assert report["epsilon"] == pytest.approx(trainer.strategy.spending.guarantee().epsilon)  # type: ignore[attr-defined]
    assert any("mean of squares" in note for note in report["notes"])


def test_weights_are_tested_with_the_statistics_they_were_trained_with(tmp_path: Path) -> None:
    module, trainer, data = mean_session(tmp_path)
    file = tmp_path / "weights.ckpt"
    trainer.save_checkpoint(file, weights_only=True)
    content = torch.load(file, weights_only=True)
    assert set(content[STATISTICS]) == {label for label, _ in MEANS}
    for strategy in (mean_strategy(None), "auto"):
        fresh, other = MeanBlobs(), make_module()
        made = make_trainer(strategy, max_steps=12)
        made.test(other, datamodule=fresh, ckpt_path=str(file), weights_only=False, verbose=False)
        assert torch.equal(fresh.used["mean of rows"], data.used["mean of rows"])
    fresh = MeanBlobs()
    with pytest.raises(ValueError, match="have not been released"):
        make_trainer("auto", max_steps=12).test(module, datamodule=fresh, verbose=False)
    restore_statistics(content, fresh)
    assert fresh.used
