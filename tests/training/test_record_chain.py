"""The record of steps is a chain: what is cut, edited or lost shows, or counts as released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from small_runs import Crash, fit, make_plan

from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.privacy import branches
from lipdp_lightning.training import step_record
from lipdp_lightning.training.step_record import StepRecord

KEY, OTHER = b"k" * 32, b"o" * 32
A, B = "a" * 16, "b" * 16


def session(
    folder: Path, *callbacks: Callback, crash: int | None = None, every: int | None = None, **options: Any
) -> Any:
    checkpoint = folder / "checkpoints" / "last.ckpt"
    folder.mkdir(exist_ok=True)
    keeper = ResumeCheckpoint(folder / "checkpoints", every_n_steps=every)
    taken = [*callbacks, keeper, *([] if crash is None else [Crash(crash)])]
    plan = make_plan(steps=options.pop("steps", 40))
    try:
        _, trainer = fit(
            plan, *taken, directory=folder, checkpoint=checkpoint if checkpoint.exists() else None,
            **options,
        )  # fmt: skip
    except InterruptedError:
        return None
    return trainer


def lines(folder: Path) -> list[str]:
    return (folder / "steps.txt").read_text().splitlines(keepends=True)


def write(folder: Path, content: list[str]) -> None:
    (folder / "steps.txt").write_text("".join(content))


def chained(folder: Path, steps: int, key: bytes = KEY) -> StepRecord:
    record = StepRecord(folder / "steps.txt")
    for step in range(steps):
        record.take(A, step, f"{step:032x}", key)
    record.close()
    return StepRecord(folder / "steps.txt")


# ---- the chain itself


def test_an_untouched_chain_is_accepted_and_repeats(tmp_path: Path) -> None:
    record = chained(tmp_path, 5)
    record.require(A, range(5), KEY)
    record.take(A, 3, f"{3:032x}", KEY)
    record.take(B, 0, "c" * 32, OTHER)
    record.take(A, 5, f"{5:032x}", KEY)
    StepRecord(tmp_path / "steps.txt").require(A, range(6), KEY)


EDITS = {
    "a line is left out": lambda found: [*found[:2], *found[3:]],
    "two lines change places": lambda found: [found[0], found[2], found[1], *found[3:]],
    "the first line is left out": lambda found: found[1:],
    "a digest is edited": lambda found: [found[0], found[1][:20] + "0123" + found[1][24:], *found[2:]],
    "a line of another run": lambda found: [*found[:2], f"{A} 2 {'5' * 32}\n", *found[3:]],
}


@pytest.mark.parametrize("name", EDITS)
def test_lines_that_were_edited_are_refused(tmp_path: Path, name: str) -> None:
    chained(tmp_path, 5)
    write(tmp_path, EDITS[name](lines(tmp_path)))
    with pytest.raises(ValueError, match=r"steps.txt.*(edited|lacks).*HINT"):
        StepRecord(tmp_path / "steps.txt").require(A, range(1) if name.startswith("the first") else range(2), KEY)


def test_a_chain_under_another_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"steps.txt.*edited.*HINT"):
        chained(tmp_path, 3, OTHER).require(A, range(3), KEY)


# ---- a run that is continued


def test_a_record_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """Lines of an earlier branch are not asked for by number: the checkpoint keeps how many there were."""
    session(tmp_path, crash=4, every=2)
    found = lines(tmp_path)
    write(tmp_path, [f"{'c' * 16} 0 {'1' * 32}\n", *found])
    with pytest.raises(ValueError, match=r"steps.txt.*HINT"):
        session(tmp_path)


def test_a_record_shorter_than_the_reservations_prove_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reservation is written when all steps of the first have been released."""
    monkeypatch.setattr(branches, "RESERVED_AT_ONCE", 4)
    session(tmp_path, crash=10)  # the only checkpoint is that of step 0
    write(tmp_path, lines(tmp_path)[:7])
    with pytest.raises(ValueError, match=r"steps.txt.*lacks 1 of them, step 7 the first.*HINT"):
        session(tmp_path)
    write(tmp_path / ".." / tmp_path.name, lines(tmp_path))


def test_lines_that_a_power_cut_may_have_taken_count_as_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot nobody knows whether lines are lost: a new secret goes on, and both branches count."""
    monkeypatch.setattr(step_record, "boot_id", lambda: "first")
    session(tmp_path, crash=6, steps=120)
    write(tmp_path, lines(tmp_path)[:3])
    monkeypatch.setattr(step_record, "boot_id", lambda: "second")
    trainer = session(tmp_path, steps=120, trainer_options={"max_steps": 8})
    assert trainer.strategy.branches.count == 2
    assert trainer.strategy.branches.spent(8) == branches.RESERVED_AT_ONCE + 8


def test_a_kill_without_a_reboot_repeats_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_record, "boot_id", lambda: "first")
    session(tmp_path, crash=6)
    trainer = session(tmp_path)
    assert trainer.strategy.branches.count == 1 and trainer.global_step == 40


def test_a_reboot_between_two_clean_sessions_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_record, "boot_id", lambda: "first")
    session(tmp_path, trainer_options={"max_steps": 6})
    monkeypatch.setattr(step_record, "boot_id", lambda: "second")
    trainer = session(tmp_path)
    assert trainer.strategy.branches.count == 1 and trainer.global_step == 40
