"""Checkpoints on disk: plain content only, sealed as a whole, and never half there."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import SECRET, fit, make_module, make_plan

from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.training.checkpoint_files import OwnerOnlyCheckpointIO, read_checkpoint, seal


class Touch:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve planned steps that stopped after five."""
    folder = tmp_path_factory.mktemp("stopped")
    fit(make_plan(), ResumeCheckpoint(folder / "checkpoints"), directory=folder, trainer_options={"max_steps": 5})
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def resume(run: Path) -> None:
    fit(make_plan(), ResumeCheckpoint(run / "checkpoints"), directory=run, checkpoint=last(run))


# ---- what is in them


def test_a_resume_runs_no_code_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    """Even where the caller asks Lightning for pickles, and the file is sealed as ours are."""
    content = read_checkpoint(last(run)) | {"callbacks": {"x": Touch(tmp_path / "ran")}}
    for sealed in (True, False):
        torch.save(content, last(run))
        if sealed:
            last(run).write_bytes(seal(last(run).read_bytes(), SECRET))
        with pytest.raises(ValueError, match="HINT"):
            resume(run)
        assert not (tmp_path / "ran").exists()
    torch.load(last(run), weights_only=False)
    assert (tmp_path / "ran").exists(), "the control: this file does run code"


class NotPlain(ResumeCheckpoint):
    """A callback whose state holds something that only a pickle could bring back."""

    kept: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [1, {"deep": self.kept}]}


@pytest.mark.parametrize("kept", [np.float64(1.0), np.zeros(2), object(), print, frozenset({1}), range(3)])
def test_a_state_that_is_not_plain_is_refused_by_name_when_it_is_saved(tmp_path: Path, kept: Any) -> None:
    keeper = NotPlain(tmp_path / "checkpoints")
    keeper.kept = kept
    with pytest.raises(ValueError, match=rf"NotPlain.*kept.*deep.*{type(kept).__name__}.*HINT"):
        fit(make_plan(), keeper, directory=tmp_path)
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_a_scheduler_or_an_optimizer_that_is_not_plain_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"odd": Touch(tmp_path / "ran")}

    module = make_module(optimizer=lambda parameters: Odd(parameters, lr=0.1))
    with pytest.raises(ValueError, match=r"optimizer_states.*odd.*Touch.*HINT"):
        fit(make_plan(), ResumeCheckpoint(tmp_path / "checkpoints"), module=module, directory=tmp_path)


# ---- the seal


def test_every_flipped_bit_and_every_truncation_is_refused(run: Path) -> None:
    whole, chance = last(run).read_bytes(), random.Random(0)
    assert read_checkpoint(last(run))["global_step"] == 5
    bits = chance.sample(range(8 * len(whole)), 400) + list(range(8 * len(whole) - 8 * 120, 8 * len(whole), 7))
    damaged = {f"bit {bit}": _flipped(whole, bit) for bit in bits}
    damaged |= {f"{cut} bytes": whole[:cut] for cut in (0, 1, 22, len(whole) // 2, len(whole) - 1)}
    damaged |= {"appended": whole + b"\0", "twice": whole + whole}
    accepted = []
    for name, content in damaged.items():
        last(run).write_bytes(content)
        try:
            read_checkpoint(last(run))
        except ValueError as error:
            assert "HINT" in str(error) and "\n" not in str(error) and str(last(run)) in str(error)
        else:
            accepted.append(name)
    assert accepted == []


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_nothing_of_a_damaged_file_is_parsed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last(run).write_bytes(_flipped(last(run).read_bytes(), 8000))

    def parse(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(torch, "load", parse)
    with pytest.raises(ValueError, match=r"damaged.*HINT"):
        read_checkpoint(last(run))


def test_a_seal_under_another_key_than_the_content_states_is_refused(run: Path) -> None:
    content = torch.load(last(run), weights_only=True)
    torch.save(content, last(run))
    last(run).write_bytes(seal(last(run).read_bytes(), bytes(16)))
    with pytest.raises(ValueError, match=r"sealed.*HINT"):
        read_checkpoint(last(run))


def test_a_checkpoint_without_a_seal_is_refused_with_a_hint(run: Path) -> None:
    torch.save(torch.load(last(run), weights_only=True), last(run))
    with pytest.raises(ValueError, match=r"earlier version.*no authentication code.*HINT"):
        resume(run)


def test_a_released_checkpoint_of_weights_alone_is_sealed_too(run: Path) -> None:
    _, trainer = fit(make_plan())
    trainer.save_checkpoint(run / "weights.ckpt", weights_only=True)
    assert "lipdp" not in read_checkpoint(run / "weights.ckpt")
    (run / "weights.ckpt").write_bytes(_flipped((run / "weights.ckpt").read_bytes(), 5000))
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(run / "weights.ckpt")


def test_other_programs_can_still_open_the_file(run: Path) -> None:
    assert torch.load(last(run), weights_only=True)["global_step"] == 5


@pytest.mark.parametrize("content", [5, "x", {"secret": "x"}, {"secret": b"x", "branches": [{"id": 5}]}, None, []])
def test_a_privacy_state_of_another_shape_is_refused(run: Path, content: Any) -> None:
    saved = read_checkpoint(last(run)) | {"lipdp": content}
    torch.save(saved, last(run))
    secret = content["secret"] if isinstance(content, dict) and isinstance(content["secret"], bytes) else b""
    last(run).write_bytes(seal(last(run).read_bytes(), secret))
    with pytest.raises(ValueError, match="HINT"):
        resume(run)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_name_that_is_no_file_is_refused_at_once(run: Path, make: Callable[[Path], None]) -> None:
    last(run).unlink()
    make(last(run))
    with pytest.raises(ValueError, match=r"last.ckpt.*HINT"):
        read_checkpoint(last(run))


# ---- writing


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be longer than 2000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_is_too_large_is_named_and_leaves_the_old_one(run: Path, small_files: None) -> None:
    before, content = last(run).read_bytes(), read_checkpoint(last(run))
    with pytest.raises(OSError, match=r"last.ckpt cannot be written: File too large.*unchanged.*HINT") as caught:
        OwnerOnlyCheckpointIO().save_checkpoint(content, last(run))
    assert "\n" not in str(caught.value)
    assert last(run).read_bytes() == before and [p.name for p in last(run).parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_a_write_that_fails_leaves_nothing_of_the_secret(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    before, content = last(run).read_bytes(), read_checkpoint(last(run))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=rf"last.ckpt cannot be written: {os.strerror(code)}.*HINT"):
        OwnerOnlyCheckpointIO().save_checkpoint(content, last(run))
    monkeypatch.undo()
    assert last(run).read_bytes() == before and [p.name for p in last(run).parent.iterdir()] == ["last.ckpt"]


def test_what_a_killed_writer_left_is_removed_at_the_next_start(run: Path) -> None:
    names = [".last.ckpt.123.0badcafe.part", ".last.ckpt.123.0badcafe0bad.tmp"]
    for name in names:
        (last(run).parent / name).write_bytes(SECRET)
    (last(run).parent / ".mine.part").write_bytes(b"kept")
    resume(run)
    assert sorted(p.name for p in last(run).parent.iterdir()) == [".mine.part", "last.ckpt"]
