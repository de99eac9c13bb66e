"""Run directories of somebody else, damaged ones and what is none: read without running code, refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_runs import LONG, Outcome, fit, lipdp, snapshot

from lipdp_lightning.experiment.foreign_code import check_named_code
from lipdp_lightning.release import load_release
from lipdp_lightning.training.checkpoint_files import read_checkpoint, seal


class Touch:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


COMMANDS: dict[str, Callable[[Path, Path], Outcome]] = {
    "fit": lambda run, out: fit(run, *LONG),
    "test": lambda run, out: lipdp("test", "--run_dir", run),
    "export": lambda run, out: lipdp("export", "--run_dir", run, "--output", out / "release.pt"),
    "report": lambda run, out: lipdp("report", "--run_dir", run, "--output", out / "report"),
    "status": lambda run, out: lipdp("status", run.parent),
}


# ---- hostile files


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_checkpoint_pickles(run_dir: Path, tmp_path: Path, command: str) -> None:
    marker, last = tmp_path / "ran", run_dir / "checkpoints" / "last.ckpt"
    content = read_checkpoint(last)
    for sealed in (True, False):
        torch.save(content | {"callbacks": {"x": Touch(marker)}, "optimizer_states": [Touch(marker)]}, last)
        if sealed:
            last.write_bytes(seal(last.read_bytes(), content["lipdp"]["secret"]))
        outcome = COMMANDS[command](run_dir, tmp_path)
        (tmp_path / "release.pt").unlink(missing_ok=True)
        assert not marker.exists()
        if command in ("fit", "test", "export"):
            assert outcome.code == 2 and "last.ckpt" in outcome.err and outcome.err.count("\n") == 1
    torch.load(last, weights_only=False)
    assert marker.exists(), "the control: this file does run code"


READ = {
    "fit": ("run.json", "ledger.json", "steps.txt"),
    "test": ("run.json", "config.yaml", "temperature.json"),
    "export": ("run.json", "plan.json", "privacy_report.json", "config.yaml", "temperature.json"),
    "report": ("privacy_report.json",),
    "status": ("run.json", "plan.json", "privacy_report.json", "ledger.json", "steps.txt"),
}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, names in READ.items() for name in names])
def test_no_command_runs_what_another_file_pickles(run_dir: Path, tmp_path: Path, command: str, name: str) -> None:
    marker = tmp_path / "ran"
    hostile = pickle.dumps(Touch(marker), protocol=0)
    if name == "config.yaml":
        hostile = f"!!python/object/apply:builtins.open ['{marker}', 'w']\n".encode()
    (run_dir / name).write_bytes(hostile)
    outcome = COMMANDS[command](run_dir, tmp_path)
    assert not marker.exists() and outcome.code in (0, 2) and "Traceback" not in outcome.err
    if outcome.code:
        assert name in outcome.err and "HINT" in outcome.err


@pytest.mark.parametrize("key", ["callbacks", "logger", "plugins"])
@pytest.mark.parametrize("form", ["class", "function"])
def test_a_copied_configuration_does_not_choose_code(run_dir: Path, tmp_path: Path, key: str, form: str) -> None:
    """`lipdp test` makes what config.yaml names; in a directory that was copied here, that is somebody's choice."""
    config, marker = yaml.safe_load((run_dir / "config.yaml").read_text()), tmp_path / "ran"
    named = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(marker)]}}
    if form == "function":
        named = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_test_start": "os.abort"}}
    config["trainer"][key] = [named]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = lipdp("test", "--run_dir", run_dir)
    assert outcome.code == 2 and not marker.exists() and outcome.err.count("\n") == 1
    assert ("subprocess.Popen" if form == "class" else "os.abort") in outcome.err
    assert str(run_dir / "config.yaml") in outcome.err and "--trust_config" in outcome.err


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("subprocess.Popen", True), ("os.system", True), ("lipdp_lightning.files.os.system", True),
        ("torch.nn.modules.module.torch.hub.load", True), ("lipdp_lightning.cli.sys.exit", True),
        ("torch.optim.optimizer.torch.load", True), ("callbacks.privacy_report.importlib.import_module", True),
        ("torch.load", True), ("builtins.exec", True), ("torch.nn.Linear", False), ("torch.optim.SGD", False),
        ("torch.optim.lr_scheduler.StepLR", False), ("lipdp_lightning.models.MLP", False),
        ("data_modules.Digits", False), ("callbacks.CalibrationMetrics", False),
        ("lightning.pytorch.callbacks.LambdaCallback", False), ("validation/accuracy", False), ("1.5", False),
        ("no_such_module_here.X", False), ("lipdp_lightning.nothing.here", False),
        ("lipdp_lightning.experiment.stored_model.stored_model", True), ("lipdp_lightning.cli.main", True),
        ("lipdp_lightning.load_release", True), ("lipdp_lightning.privatize", True), ("lipdp_lightning.release", True),
        ("lipdp_lightning.audit.blackbox.user_script", True), ("lipdp_lightning.adoption.Engine", True),
        ("lipdp_lightning.layers.convert.make_private", False), ("lipdp_lightning.schedules.WarmupCosine", False),
        ("lipdp_lightning.augmentations.ShiftedCrop", False), ("lipdp_lightning.features.Scattering", False),
        ("lipdp_lightning.bounds.losses.CrossEntropy", False), ("lipdp_lightning.bounds.certify", True),
    ],
)  # fmt: skip
def test_names_are_followed_to_where_they_are_defined(text: str, refused: bool) -> None:
    """A module of ours imports others, and a path through it leads to them."""
    if refused:
        with pytest.raises(ValueError, match=r"names code outside.*HINT"):
            check_named_code(yaml.safe_dump({"a": [{"class_path": text}]}), "config.yaml")
    else:
        check_named_code(yaml.safe_dump({"a": [{"class_path": text}]}), "config.yaml")


@pytest.mark.parametrize(
    "key", ["config", "data", "model", "model.network", "trainer", "trainer.callbacks", "optimizer", "lr_scheduler"]
)
@pytest.mark.parametrize("command", ["test", "predict", "release"])
def test_a_file_that_a_copied_configuration_names_does_not_choose_code(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, key: str
) -> None:
    """The parser takes a file's name for the value of a group or an object; its modules run when they are imported."""
    marker = tmp_path / "ran"
    (tmp_path / "of_somebody.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named: Any = {"class_path": "of_somebody.Thing"}
    inside = {"config": {"data": named}, "model": {"network": named}, "trainer": {"callbacks": [named]}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(inside.get(key, [named] if key[-1] == "s" else named)))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    *groups, last = key.split(".")
    (config[groups[0]] if groups else config)[last] = str(tmp_path / "other.yaml")
    text = yaml.safe_dump(config)
    if command == "release":
        assert lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "release.pt").code == 0
        content = torch.load(tmp_path / "release.pt", weights_only=True)
        torch.save(content | {"config": text}, tmp_path / "release.pt")
        if key.startswith("model"):
            with pytest.raises(ValueError, match="cannot be made"):
                load_release(tmp_path / "release.pt").module()
    (run_dir / "config.yaml").write_text(text)
    source = ("--release", tmp_path / "release.pt") if command == "release" else ("--run_dir", run_dir)
    output = () if command == "test" else ("--output", tmp_path / "out.csv")
    outcome = lipdp("test" if command == "test" else "predict", *source, *output)
    assert outcome.code == 2 and not marker.exists() and outcome.err.count("\n") == 1
    assert "names code outside this package: of_somebody.Thing" in outcome.err


@pytest.mark.parametrize("command", ["test", "release"])
@pytest.mark.parametrize("way", ["nested", "évil", "_evil", "Évil_1"])
def test_a_copied_configuration_does_not_choose_code_by_a_function_or_another_alphabet(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, way: str
) -> None:
    """A function of this package makes what another text names, and a module's name may begin with any letter."""
    marker, name = tmp_path / "ran", "of_somebody" if way == "nested" else way
    (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    named: Any = {"class_path": f"{name}.Thing"}
    if way == "nested":
        inner = yaml.safe_dump({"model": {"network": named, "loss": "cross_entropy", "input_bound": 1.0}})
        named = {"class_path": "lipdp_lightning.experiment.stored_model.stored_model"}
        named["init_args"] = {"config": inner, "place": "x"}
    if command == "release":
        assert lipdp("export", "--run_dir", run_dir, "--output", tmp_path / "release.pt").code == 0
    config["model"]["network"] = named
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    words: tuple[Any, ...] = ("test", "--run_dir", run_dir)
    if command == "release":
        content = torch.load(tmp_path / "release.pt", weights_only=True)
        torch.save(content | {"config": yaml.safe_dump(config)}, tmp_path / "release.pt")
        words = ("predict", "--release", tmp_path / "release.pt", "--output", tmp_path / "out.csv")
    outcome = lipdp(*words)
    assert not marker.exists(), "code of somebody else ran"
    assert outcome.code == 2 and "names code outside this package" in outcome.err and outcome.err.count("\n") == 1


def test_a_copied_configuration_of_known_classes_is_tested(run_dir: Path) -> None:
    outcome = lipdp("test", "--run_dir", run_dir)
    assert outcome.code == 0, outcome.err


def test_only_test_makes_what_a_stored_configuration_names(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was made from a stored configuration")

    monkeypatch.setattr("lipdp_lightning.experiment.experiment.Experiment.__init__", never)
    for command in ("export", "report", "status"):
        assert COMMANDS[command](run_dir, tmp_path).code == 0
    outcome = COMMANDS["test"](run_dir, tmp_path)
    assert outcome.code == 2 and "something was made from a stored configuration" in outcome.err


# ---- what is no run directory of this user


def _missing(path: Path) -> None:
    pass


def _file(path: Path) -> None:
    path.write_text("x")


def _empty(path: Path) -> None:
    path.mkdir()


def _another_project(path: Path) -> None:
    path.mkdir()
    (path / "pyproject.toml").write_text("x")
    (path / "config.yaml").write_text("x")


def _half_written(path: Path) -> None:
    path.mkdir()
    for name in ("lock", "config.yaml", "plan.json"):
        (path / name).touch()


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_missing, "does not exist"),
    "file": (_file, "it is a file"),
    "empty": (_empty, "it is empty"),
    "another project": (_another_project, "it holds config.yaml, pyproject.toml"),
    "half-written": (_half_written, "run lipdp fit again"),
}


@pytest.mark.parametrize("command", ["test", "export", "report"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_run_directory_is_said_in_one_line(tmp_path: Path, command: str, kind: str) -> None:
    make, complaint = KINDS[kind]
    make(tmp_path / "run")
    before = snapshot(tmp_path)
    outcome = COMMANDS[command](tmp_path / "run", tmp_path)
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err
    assert "is not a run directory" in outcome.err and outcome.err.count("\n") == 1 and snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "another project"])
def test_fit_does_not_take_what_is_something_else(tmp_path: Path, kind: str) -> None:
    KINDS[kind][0](tmp_path / "run")
    before = snapshot(tmp_path)
    outcome = fit(tmp_path / "run", *LONG)
    assert outcome.code == 2 and "is not a run directory" in outcome.err and outcome.err.count("\n") == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["fit", "test", "export", "report"])
@pytest.mark.parametrize("change", ["version", "owner"])
def test_a_run_of_another_version_or_user_is_refused(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, change: str
) -> None:
    if change == "version":
        if command == "report":
            (run_dir / "privacy_report.json").unlink()
        record = json.loads((run_dir / "run.json").read_text())
        (run_dir / "run.json").write_text(json.dumps(record | {"format": 99}))
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    before = snapshot(run_dir)
    outcome = COMMANDS[command](run_dir, tmp_path)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "HINT" in outcome.err
    assert ("another version" if change == "version" else "another user") in outcome.err
    assert snapshot(run_dir) == before


# ---- damage

JUNK: dict[str, Any] = {
    "empty": b"", "no UTF-8": b"\xff\xfe\x00", "a list": b"[]", "a number": b"3", "deep": b"[" * 100_000,
    "an escape": b'{"status": "\x1b[31m"}', "null": b"null", "huge number": b'{"steps": 1' + b"0" * 5000 + b"}",
    "odd types": b'{"status": [], "steps": {}, "plan": 3, "branches": [3, {"reached": "x"}, {}], "metrics": [1], '
    b'"epsilon": "\\u001b[31m", "delta": [], "format": {}}',
    "infinite": b'{"epsilon": Infinity, "delta": NaN, "status": "running", "steps": -1, "metrics": {"test/mae": {}}}',
}  # fmt: skip
FILES = ("run.json", "plan.json", "privacy_report.json", "ledger.json", "steps.txt")


def test_status_lists_every_damaged_run_with_its_state(stopped: Path, tmp_path: Path) -> None:
    names = {}
    for name in FILES:
        for label, content in JUNK.items():
            run = Path(shutil.copytree(stopped, tmp_path / "runs" / f"{name} {label}"))
            (run / name).write_bytes(content)
            names[run.name] = name
        for label, make in {"directory": Path.mkdir, "pipe": os.mkfifo, "loop": _loop, "missing": _missing}.items():
            run = Path(shutil.copytree(stopped, tmp_path / "runs" / f"{name} {label}"))
            (run / name).unlink()
            make(run / name)
            names[run.name] = name
    outcome = lipdp("status", tmp_path / "runs", "--json")
    rows = {Path(row["run"]).name: row for row in json.loads(outcome.out)}
    assert outcome.code == 0 and set(rows) == set(names)
    for run_name, file in names.items():
        wrong = "incomplete" if run_name.endswith("missing") else "unreadable"
        if file != "run.json":
            assert rows[run_name]["state"] == "stopped"
        elif not run_name.endswith("infinite"):
            assert rows[run_name]["state"] == wrong, run_name
    text = lipdp("status", tmp_path / "runs")
    assert text.code == 0 and len(text.out.splitlines()) == len(names) + 2 and "\x1b" not in text.out


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("command", ["fit", "test", "export", "report"])
@pytest.mark.parametrize("label", ["odd types", "deep", "no UTF-8", "an escape", "infinite"])
def test_damage_is_one_line_in_every_command(run_dir: Path, tmp_path: Path, command: str, label: str) -> None:
    name = {"fit": "ledger.json", "test": "run.json", "export": "privacy_report.json", "report": "privacy_report.json"}
    (run_dir / name[command]).write_bytes(JUNK[label])
    outcome = COMMANDS[command](run_dir, tmp_path)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "HINT" in outcome.err, outcome.err
    assert "\x1b" not in outcome.err and "Traceback" not in outcome.err


# ---- text that is not for the terminal


def test_names_with_escapes_do_not_reach_the_terminal(stopped: Path, tmp_path: Path) -> None:
    odd = "\x1b]0;title\x07\x1b[2J\u202egnp.exe\r\x9b31m"
    folder = Path(shutil.copytree(stopped, tmp_path / odd / "run"))
    for outcome in (
        lipdp("status", folder.parent), lipdp("status", tmp_path / odd / "no"),
        lipdp("test", "--run_dir", tmp_path / odd),
        lipdp("export", "--run_dir", folder, "--output", tmp_path / "release.pt"),
        lipdp("export", "--run_dir", folder, "--output", folder / "release.pt"),
        lipdp("report", "--run_dir", folder), lipdp("curves", "ecdf", "--data", folder / "no.csv", "--column", odd),
        lipdp(odd), fit(tmp_path / odd, *LONG),
    ):  # fmt: skip
        for text in (outcome.out, outcome.err):
            assert all(c.isprintable() or c == "\n" for c in text), (outcome, text)
    json_text = lipdp("status", folder.parent, "--json").out
    assert json_text.isascii() and json.loads(json_text)[0]["run"] == str(folder)


def test_bytes_that_are_no_text_do_not_end_a_command(stopped: Path, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    shutil.copytree(stopped, folder)
    outcome = lipdp("status", tmp_path)
    assert outcome.code == 0 and outcome.out.encode("utf-8")


def test_a_hostile_feature_cache_runs_nothing(tmp_path: Path) -> None:
    from lipdp_lightning.features.cache import KeptRows

    np.save(tmp_path / "x.npy", np.array([Touch(tmp_path / "ran")], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"Python objects|allow_pickle"):
        KeptRows(tmp_path / "x.npy", (1,))[0:1]
    assert not (tmp_path / "ran").exists()
