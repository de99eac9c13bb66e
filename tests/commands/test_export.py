"""What is released of a run, and that the run's secret is not in it."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path

import pytest
import torch
import yaml
from command_runs import Outcome, lipdp, snapshot

from lipdp_lightning.commands.export import RELEASED_KEYS, traces
from lipdp_lightning.models import MLP

LAST = Path("checkpoints") / "last.ckpt"


def secret_of(run_dir: Path) -> bytes:
    secret = torch.load(run_dir / LAST, weights_only=False)["lipdp"]["secret"]
    assert isinstance(secret, bytes) and len(secret) == 16
    return secret


def texts_of(secret: bytes) -> list[bytes]:
    """Ways in which a file could hold the secret, written without the code under test."""
    found = [secret.hex().encode(), secret.hex().upper().encode(), str(list(secret)).encode()[1:-1]]
    found += [b64encode(secret).rstrip(b"=")[:-1], urlsafe_b64encode(secret).rstrip(b"=")[:-1]]
    found += [b64encode(b"x" + secret)[2:-4], b64encode(b"xy" + secret)[3:-4]]
    return [*found, secret.decode("latin-1").encode(), secret, secret[::-1], repr(secret).encode()[2:-1]]


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def test_a_release_holds_weights_plan_certificate_and_report(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    source, before = finished[0], snapshot(finished[0])
    outcome = lipdp("export", "--run_dir", source, "--output", tmp_path / "release.pt")
    assert outcome.code == 0 and "1 tensors, epsilon" in outcome.out
    assert [p.name for p in tmp_path.iterdir()] == ["release.pt"] and snapshot(source) == before
    release = torch.load(tmp_path / "release.pt", weights_only=True)  # no code is needed to read it
    assert set(release) == set(RELEASED_KEYS)
    network = MLP(input_shape=(1, 8, 8), outputs=10, bias=False)
    network.load_state_dict(release["state_dict"])
    trained = torch.load(source / LAST, weights_only=False)["state_dict"]
    assert torch.equal(next(iter(release["state_dict"].values())), next(iter(trained.values())))
    assert release["plan"] == json.loads((source / "plan.json").read_text())
    assert release["privacy_report"]["epsilon"] > 0 and release["certificate"][0]["delta"] > 0
    assert yaml.safe_load(release["config"])["privacy"]["steps"] == 12


def test_the_secret_is_in_no_byte_of_it(finished: tuple[Path, Outcome], tmp_path: Path) -> None:
    source, target = finished[0], tmp_path / "release.pt"
    assert lipdp("export", "--run_dir", source, "--output", target).code == 0
    released, secret = target.read_bytes(), secret_of(source)
    assert any(text in (source / LAST).read_bytes() for text in texts_of(secret)), "the control: a checkpoint holds it"
    assert [text for text in texts_of(secret) if text in released] == []
    for word in (b"lipdp_optimizers", b"optimizer_states", b"exp_avg", b"branches"):
        assert word not in released, word
    assert b"optimizer_states" in (source / LAST).read_bytes()


@pytest.mark.parametrize("form", range(7))
def test_a_release_with_the_secret_in_it_is_refused(run_dir: Path, tmp_path: Path, form: int) -> None:
    """Whatever way it got there: here through the configuration, as text."""
    text = texts_of(secret_of(run_dir))[form]
    with open(run_dir / "config.yaml", "ab") as file:
        file.write(b"\n# " + text + b"\n")
    outcome = lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "release.pt")
    assert outcome.code == 2 and "the run's secret" in outcome.err and "HINT" in outcome.err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_traces_are_found_and_only_those() -> None:
    secret = bytes(range(150, 166))
    hidden = [b"..", *(b"ab"[:n] for n in range(3))]
    assert all(traces(secret, b64encode(prefix + secret + b"tail")) for prefix in hidden)
    assert traces(secret, b"x" + secret + b"y") == ["as bytes"]
    assert traces(secret, b64encode(bytes(range(50)))) == [] and traces(b"", b"anything") == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: (d / LAST).unlink(), "last.ckpt is missing"),
        (lambda d: (d / LAST).write_bytes((d / LAST).read_bytes()[:2000]), "truncated or damaged"),
        (lambda d: (d / "privacy_report.json").unlink(), "privacy_report.json is missing"),
        (lambda d: (d / "plan.json").unlink(), "plan.json is missing"),
        (lambda d: mark(d, status="preempted"), "is preempted"),
        (lambda d: mark(d, status="running", steps=None), "is running"),
        (lambda d: mark(d, steps=11), "not of the checkpoint's step 12"),
    ],
)
def test_a_run_that_cannot_be_released_is_refused(
    run_dir: Path, tmp_path: Path, change: object, complaint: str
) -> None:
    change(run_dir)  # type: ignore[operator]
    outcome = lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "release.pt")
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def mark(run_dir: Path, **facts: object) -> None:
    record = json.loads((run_dir / "run.json").read_text()) | facts
    (run_dir / "run.json").write_text(json.dumps(record))


def test_nothing_is_overwritten(run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "release.pt"
    target.write_text("mine")
    outcome = lipdp("export", "--run_dir", run_dir, "--output", target)
    assert outcome.code == 2 and "exists" in outcome.err and target.read_text() == "mine"
    outcome = lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "nowhere" / "release.pt")
    assert outcome.code == 2 and "not a directory" in outcome.err
