"""Run directories: made whole, taken up after a death at any moment, and told from everything else."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import SECRET, Crash, fit, make_plan

from lipdp_lightning.callbacks import PrivacyReport, ResumeCheckpoint
from lipdp_lightning.training.run_directory import RunDirectory
from lipdp_lightning.training.step_record import StepRecord

PLAN = {"steps": 12}


def claim(path: Path) -> bool:
    directory = RunDirectory(path)
    try:
        return directory.claim("digest", PLAN, "seed: 1\n")
    finally:
        directory.release()


def dies_at(call: int, work: Callable[[], object]) -> bool:
    """Whether a process that ends at its n-th change of the file system, as `kill -9` does, got that far."""
    child = os.fork()
    if child == 0:
        left = [call]
        for name in ("replace", "open", "mkdir", "fsync"):
            real: Any = getattr(os, name)

            def counted(*a: Any, _real: Any = real, **k: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return _real(*a, **k)

            setattr(os, name, counted)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_new_run_is_taken_up_wherever_it_was_killed(tmp_path: Path) -> None:
    call = 0
    while dies_at(call := call + 1, lambda: claim(tmp_path / "r" / str(call))):
        run = tmp_path / "r" / str(call)
        begun = (run / "run.json").exists()
        assert claim(run) == begun
        found = {"lock", "config.yaml", "plan.json", "run.json", "steps.txt"}
        assert {p.name for p in run.iterdir()} == found, "nothing is missing, and no part of a file is left"
        assert json.loads((run / "plan.json").read_text()) == PLAN and (run / "config.yaml").read_text() == "seed: 1\n"
    assert call > 12


def test_files_of_a_new_run_are_flushed_with_their_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    claim(tmp_path / "run")
    for name in ("config.yaml", "plan.json", "steps.txt", "run.json"):
        at = next(i for i, f in enumerate(flushed) if f.startswith(f".{name}."))
        assert flushed[at + 1] == "run", name


@pytest.mark.parametrize("name", ["mine.txt", "config.yaml", "ledger.json", ".last.ckpt.1.part"])
def test_a_directory_with_anything_else_in_it_is_not_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=r"is not a run directory.*HINT"):
        claim(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_a_half_made_run_with_steps_in_it_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "steps.txt").write_text("a" * 16 + " 0 " + "b" * 32 + "\n")
    with pytest.raises(ValueError, match=r"run.json is missing.*HINT"):
        claim(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "steps.txt", "run.json"])
def test_a_file_that_cannot_be_written_is_named_and_the_run_can_begin_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise OSError(code, os.strerror(code))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match=rf"{name} cannot be written: {os.strerror(code)}.*unchanged.*HINT") as caught:
        claim(tmp_path / "run")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert claim(tmp_path / "run") is False


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ValueError, match=r"name is empty.*HINT"):
        RunDirectory("")
    RunDirectory(".")


def test_the_owner_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for use in (lambda: claim(tmp_path / "run"), RunDirectory(tmp_path / "run").require):
        with pytest.raises(ValueError, match=r"belongs to another user.*HINT"):
            use()


def test_a_directory_knows_whether_it_was_made_here(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    assert RunDirectory(tmp_path / "run").made_here()
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert RunDirectory(tmp_path / "renamed").made_here()
    shutil.copytree(tmp_path / "renamed", tmp_path / "copy")
    assert not RunDirectory(tmp_path / "copy").made_here()
    claim(tmp_path / "copy")  # its configuration stays that of the copy
    assert not RunDirectory(tmp_path / "copy").made_here()


# ---- the record of steps, and copies


def session(folder: Path, crash: int | None = None, **options: Any) -> Any:
    checkpoint = folder / "checkpoints" / "last.ckpt"
    folder.mkdir(exist_ok=True)
    report = PrivacyReport(folder, publish=False)
    callbacks = [ResumeCheckpoint(folder / "checkpoints"), report]
    if crash is not None:
        callbacks.append(Crash(crash))  # type: ignore[arg-type]
    chosen = {"plan": make_plan(steps=120), "trainer_options": {"max_steps": 6}} | options
    plan = chosen.pop("plan")
    try:
        _, trainer = fit(
            plan, *callbacks, directory=folder, checkpoint=checkpoint if checkpoint.exists() else None, **chosen
        )  # fmt: skip
    except InterruptedError:
        return None
    return trainer, json.loads((folder / "privacy_report.json").read_text())["notes"]


@pytest.mark.parametrize("left", [None, 0])
def test_a_record_without_steps_that_were_taken_is_refused(tmp_path: Path, left: int | None) -> None:
    """A checkpoint after four steps, and a record that cannot say what they were released from."""
    session(tmp_path, trainer_options={"max_steps": 4})
    record = tmp_path / "steps.txt"
    record.unlink()
    if left is not None:
        record.touch()
    before = (tmp_path / "ledger.json").read_bytes()
    with pytest.raises(ValueError, match=r"steps.txt.*4 steps were taken.*HINT"):
        session(tmp_path)
    assert (tmp_path / "ledger.json").read_bytes() == before


A = "a" * 16
LINES = [f"{A} {step} {step:032x}" for step in range(4)]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (None, "is missing"),
        (LINES[:2], "lacks 2 of them, step 2 the first"),
        (LINES[1:], "lacks 1 of them, step 0 the first"),
        ([line.replace(A, "b" * 16) for line in LINES], "lacks 4 of them"),
        ([*LINES, "nonsense"], "line 5 is none"),
        ([LINES[0].replace(" ", "\t"), *LINES[1:]], "line 1 is none"),
        ([*LINES[:3], LINES[3].upper()], "line 4 is none"),
        (["\x00\xff"], "decode"),
    ],
)
def test_a_record_that_was_cut_or_edited_is_refused_where_it_shows(
    tmp_path: Path, lines: list[str] | None, complaint: str
) -> None:
    if lines is not None:
        (tmp_path / "steps.txt").write_text("".join(f"{line}\n" for line in lines), encoding="latin-1")
    with pytest.raises(ValueError, match=rf"steps.txt.*{complaint}.*HINT"):
        StepRecord(tmp_path / "steps.txt").require(A, range(4))


@pytest.mark.parametrize("last", [LINES[3], f"diverged {A} 3"])
def test_what_a_death_leaves_of_a_line_is_no_damage(tmp_path: Path, last: str) -> None:
    path = tmp_path / "steps.txt"
    for cut in range(1, len(last) + 2):
        path.write_text("\n".join([*LINES[:3], last])[:-cut])
        record = StepRecord(path)
        record.require(A, range(2))
        record.take(A, 4, "e" * 32)
        record.close()
        StepRecord(path).require(A, range(4, 5))


def test_a_step_whose_line_cannot_be_written_is_not_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    record = StepRecord(tmp_path / "steps.txt")
    record.take(A, 0, "d" * 32)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (70, before[1]))
        for _ in range(2):
            with pytest.raises(OSError, match=r"steps.txt cannot be written: File too large.*not taken.*HINT"):
                record.take(A, 1, "e" * 32)
            record.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    record.take(A, 1, "e" * 32)
    record.close()
    StepRecord(tmp_path / "steps.txt").require(A, range(2))


def test_the_record_is_on_the_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        events.append(f"to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    session(tmp_path)
    last = len(events) - 1 - events[::-1].index("to last.ckpt")
    assert "steps.txt" in events[events.index("to last.ckpt") + 1 : last]


def test_a_copy_is_told_by_more_than_the_number_of_its_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on another file system may have the same numbers; the time of its lock file is its own."""
    claim(tmp_path / "run")
    session(tmp_path / "run", crash=5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", dirs_exist_ok=True)

    def stat(path: Path) -> SimpleNamespace:
        return SimpleNamespace(st_ino=7, st_ctime_ns=os.stat(path).st_ctime_ns)

    monkeypatch.setattr("lipdp_lightning.privacy.branches.os", SimpleNamespace(stat=stat))
    session(tmp_path / "run", crash=5)
    shutil.copytree(tmp_path / "run", tmp_path / "second")
    trainer, notes = session(tmp_path / "second")
    assert trainer.strategy.branches.count == 3 and trainer.strategy.branches.secret != SECRET
    assert any("continued from a copy" in note for note in notes)


def test_the_report_of_a_copy_says_so_from_then_on_and_the_original_does_not(tmp_path: Path) -> None:
    session(tmp_path / "run", crash=5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for steps in (6, 8):
        notes = session(tmp_path / "copy", trainer_options={"max_steps": steps})[1]
        assert any("continued from a copy" in note for note in notes)
    assert not any("continued from a copy" in note for note in session(tmp_path / "run")[1])
