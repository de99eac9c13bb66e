"""`lipdp fit` from beginning to end: what it shows, what it writes, and when it goes on with a run."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_runs import LONG, QUICKSTART, ROOT, SMALL, Outcome, environment, fit, lipdp, snapshot

from lipdp_lightning.accounting.accountants import Spending
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.report import write

REPORT_KEYS = {
    "certified", "epsilon", "delta", "adjacency", "noise_multiplier", "sample_rate", "steps_taken", "accountant",
    "scaling", "allocation", "groups", "metrics", "nonprivate_released", "secret_fixed", "versions",
}  # fmt: skip


def report_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "privacy_report.json").read_text())


def status_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text())


def metric_rows(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "csv" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def spent(run_dir: Path) -> int:
    branches = json.loads((run_dir / "ledger.json").read_text())["branches"]
    return sum(b["reached"] - b["start"] for b in branches)


# ---- a run from beginning to end


def test_a_run_says_what_it_will_do_before_and_what_came_out_after(finished: tuple[Path, Outcome]) -> None:
    run_dir, outcome = finished
    assert outcome.code == 0
    assert outcome.err == "", "warnings or advice of other libraries reached the user"
    lines = outcome.out.splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step "))
    before = "\n".join(lines[:first_step])
    assert "Privacy plan" in before and "epsilon (guarantee)" in before and "Certificate per layer" in before
    assert any("epsilon=" in line and "validation/accuracy=" in line for line in lines[first_step:])
    assert "v_num" not in outcome.out
    named = {line.split()[0]: line.split()[1] for line in lines[-3:]}
    report = report_of(run_dir)
    assert named["validation/accuracy"] == f"{report['metrics']['validation/accuracy']:.4f}"
    assert report["epsilon"] <= float(named["epsilon"]) < report["epsilon"] + 1.1e-4
    assert Path(named["report"]) == run_dir / "report.html"


def test_a_run_directory_holds_the_report_the_configuration_and_the_ledger(finished: tuple[Path, Outcome]) -> None:
    run_dir, _ = finished
    assert {p.name for p in run_dir.iterdir()} >= {
        "privacy_report.json", "privacy_report.md", "report.html", "config.yaml", "plan.json", "ledger.json",
        "run.json", "checkpoints", "csv",
    }  # fmt: skip
    report = report_of(run_dir)
    assert set(report) >= REPORT_KEYS
    plan = PrivacyPlan.from_dict(json.loads((run_dir / "plan.json").read_text()))
    assert report["epsilon"] == Spending(plan).guarantee().epsilon and report["certified"] is True
    assert report["secret_fixed"] is False and report["nonprivate_released"] == []
    assert report["steps_taken"] == 12 == spent(run_dir)
    assert status_of(run_dir)["status"] == "finished"
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["privacy"]["steps"] == 12 and resolved["privacy"]["scaling"] is not None


METRICS = ("loss", "accuracy", "majority_rate", "standard_error", "balanced_accuracy", "auroc")


def test_a_run_that_predicts_one_class_is_no_success(tmp_path: Path) -> None:
    """A network that starts at zero and is not moved gives every row to the first class."""
    outcome = fit(tmp_path / "run", *SMALL, "--optimizer.init_args.lr", "0")
    assert outcome.code == 0 and "no better than always predicting the most frequent class" in outcome.out
    metrics = report_of(tmp_path / "run")["metrics"]
    assert metrics["validation/balanced_accuracy"] == pytest.approx(0.1)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "✓" not in page and "no better than the most frequent class" in page
    assert "caution" in lipdp("test", "--run_dir", tmp_path / "run").out


def test_rows_that_serve_for_validation_and_test_are_reported_once(finished: tuple[Path, Outcome]) -> None:
    metrics = report_of(finished[0])["metrics"]
    assert set(metrics) == {f"validation/{name}" for name in METRICS}


def test_different_test_rows_are_reported_beside_validation(tmp_path: Path) -> None:
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["data"] = {"class_path": "small_runs.BlobsWithValidation"}
    config["model"]["network"]["init_args"] |= {"input_shape": [6], "outputs": 3}
    config["privacy"] |= {"batch_size": 20, "delta": 1e-3}
    file = tmp_path / "blobs.yaml"
    file.write_text(yaml.safe_dump(config))
    outcome = fit(tmp_path / "run", "--config", file, *SMALL[2:])
    assert outcome.code == 0, outcome.err
    metrics = report_of(tmp_path / "run")["metrics"]
    assert set(metrics) == {f"{kind}/{name}" for kind in ("validation", "test") for name in METRICS}
    assert "test/accuracy" in outcome.out


def test_the_secret_is_in_the_resume_checkpoint_and_nowhere_else(finished: tuple[Path, Outcome]) -> None:
    run_dir, outcome = finished
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    secret = torch.load(checkpoint, weights_only=False)["lipdp"]["secret"]
    assert len(secret) == 16
    forms = [
        secret,
        secret.hex().encode(),
        base64.b64encode(secret),
        repr(secret).encode(),
        repr(list(secret)).encode(),
    ]
    holders = [name for name, content in snapshot(run_dir).items() if any(form in content for form in forms)]
    assert set(holders) <= {"checkpoints/last.ckpt"}
    assert not any(form.decode("latin-1") in outcome.out + outcome.err for form in forms)
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o600


# ---- going on with a run


def test_a_page_is_drawn_once_and_kept_if_the_evaluation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    render = write.render_html
    monkeypatch.setattr(write, "render_html", lambda facts: drawn.append(facts.steps_taken) or render(facts))
    assert fit(tmp_path / "sound", *SMALL, "--privacy.steps", "2").code == 0
    assert drawn == [2]

    def fails(*_: object) -> None:
        raise ValueError("these rows cannot be read. HINT: none.")

    monkeypatch.setattr("lipdp_lightning.commands.fit.held_out_metrics", fails)
    assert fit(tmp_path / "failed", *SMALL, "--privacy.steps", "2").code == 2
    assert drawn == [2, 2] and (tmp_path / "failed" / "report.html").is_file()
    assert report_of(tmp_path / "failed")["steps_taken"] == 2


def test_a_finished_run_is_refused(finished: tuple[Path, Outcome]) -> None:
    run_dir, _ = finished
    before = snapshot(run_dir)
    outcome = fit(run_dir, *SMALL)
    assert outcome.code == 2 and "is finished" in outcome.err and "HINT" in outcome.err
    assert snapshot(run_dir) == before


def test_a_stopped_run_states_both_epsilons_and_is_continued_to_its_end(stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.move(shutil.copytree(stopped, tmp_path / "copy"), run_dir)
    first, rows = report_of(run_dir), metric_rows(run_dir)
    plan = PrivacyPlan.from_dict(json.loads((run_dir / "plan.json").read_text()))
    spending = Spending(plan)
    assert status_of(run_dir)["status"] == "stopped" and first["steps_taken"] == 12
    assert first["epsilon"] == spending.guarantee().epsilon
    assert first["epsilon_taken"] == spending.exactly(12).epsilon
    outcome = fit(run_dir, *LONG, "--trainer.max_steps", "20")
    assert outcome.code == 0 and outcome.out.startswith(f"continuing the run in {run_dir}")
    assert "that is the guarantee, of 120 planned steps; the 20 steps" in outcome.out
    assert status_of(run_dir)["steps"] == 20 == spent(run_dir)
    after = metric_rows(run_dir)
    assert after[: len(rows)] == rows, "the metrics of the first session are gone"
    assert max(int(row["step"]) for row in after) == 20


def test_another_plan_or_model_is_refused_for_an_unfinished_run(stopped: Path) -> None:
    before = snapshot(stopped)
    cases = {
        "another privacy plan": ["--privacy.noise_multiplier", "1.7"],
        "of another model": ["--model.network.init_args.hidden", "[6]"],
        "holds the state of Adam, and SGD": ["--optimizer", "SGD", "--optimizer.init_args.lr", "0.1"],
    }
    for expected, options in cases.items():
        outcome = fit(stopped, *LONG, *options)
        assert outcome.code == 2 and expected in outcome.err and "HINT" in outcome.err, outcome.err
    assert snapshot(stopped) == before


def test_a_foreign_directory_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for target in (tmp_path, tmp_path / "thesis.tex"):
        outcome = fit(target, *SMALL)
        assert outcome.code == 2 and "is not a run directory" in outcome.err and "HINT" in outcome.err
    assert snapshot(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_directory_in_use_is_refused(stopped: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    before = snapshot(run_dir)
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(run_dir / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        outcome = fit(run_dir, *LONG, "--trainer.max_steps", "20")
        assert outcome.code == 2 and "another process is training" in outcome.err and "HINT" in outcome.err
        assert snapshot(run_dir) == before
    finally:
        process.communicate("\n", timeout=20)
    assert fit(run_dir, *LONG, "--trainer.max_steps", "14").code == 0, "the lock outlived its holder"


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty"])
def test_a_damaged_checkpoint_is_an_error_and_nothing_is_overwritten(
    stopped: Path, tmp_path: Path, damage: str
) -> None:
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    whole = checkpoint.read_bytes()
    damaged = {"truncated": whole[: len(whole) // 2], "overwritten": b"x" * len(whole), "empty": b""}
    checkpoint.write_bytes(damaged[damage])
    before = snapshot(run_dir)
    for outcome in (fit(run_dir, *LONG), lipdp("test", "--run_dir", run_dir)):
        assert outcome.code == 2 and "cannot be read" in outcome.err and "HINT" in outcome.err
        assert outcome.err.count("\n") == 1
    assert snapshot(run_dir) == before


def test_a_damaged_ledger_is_an_error(stopped: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    (run_dir / "ledger.json").write_text("{")
    outcome = fit(run_dir, *LONG)
    assert outcome.code == 2 and "ledger.json" in outcome.err and "HINT" in outcome.err


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp_lightning.callbacks import PrivacyAccountant

    shown = PrivacyAccountant.on_train_batch_end

    def interrupt(self: Any, trainer: Any, *rest: Any) -> None:
        shown(self, trainer, *rest)
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(PrivacyAccountant, "on_train_batch_end", interrupt)
        outcome = fit(tmp_path / "run", *SMALL)
    assert outcome.code == 130 and "continue with the same command" in outcome.err
    assert status_of(tmp_path / "run")["status"] == "stopped"
    assert fit(tmp_path / "run", *SMALL).code == 0
    assert report_of(tmp_path / "run")["steps_taken"] == 12 == spent(tmp_path / "run")


# ---- bad input

BAD = {
    "no configuration": ([], "no --config"),
    "a missing file": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "an unknown key": ([*SMALL, "--privacy.epsilom", "3"], "privacy.epsilom"),
    "an unknown group": ([*SMALL, "--privcy.epsilon", "3"], "privcy"),
    "a word for a number": ([*SMALL, "--privacy.batch_size", "many"], "privacy.batch_size"),
    "a word that is no choice": ([*SMALL, "--trainer.precision", "low"], "trainer.precision"),
    "a negative epsilon": (["--config", QUICKSTART, "--privacy.epsilon", "-1"], "epsilon -1"),
    "epsilon and noise": (["--config", QUICKSTART, "--privacy.noise_multiplier", "1"], "exactly one is needed"),
    "more epochs than planned": (["--config", QUICKSTART, "--trainer.max_epochs", "1000"], "the budget allows"),
    "a sharded strategy": ([*SMALL, "--trainer.strategy", "fsdp"], "strategy fsdp cannot hold the private step"),
    "another sharded strategy": ([*SMALL, "--trainer.strategy", "deepspeed"], "deepspeed cannot hold"),
    "a wrong accelerator": ([*SMALL, "--trainer.devices", "0"], "devices"),
    "a negative rate": ([*SMALL, "--optimizer.init_args.lr", "-1"], "the optimizer cannot be made"),
    "an option of no optimizer": ([*SMALL, "--optimizer.init_args.rate", "1"], "rate"),
    "an unknown data module": ([*SMALL, "--data", "data_modules.Nowhere"], "data_modules.Nowhere"),
    "a data folder that is not there": (
        [*SMALL, "--data", "data_modules.MNIST", "--data.root", "/nowhere"],
        "/nowhere",
    ),
    "an unknown loss": ([*SMALL, "--model.loss", "mse"], "loss 'mse' is unknown"),
    "another input shape": ([*SMALL, "--model.network.init_args.input_shape", "[9]"], "shape"),
    "an uncertified scaling": ([*SMALL, "--privacy.scaling", "batch_max"], "scaling 'batch_max'"),
    "a pattern for no layer": ([*SMALL, "--privacy.max_norm", '{"none*": 1.0}'], "matches no layer"),
    "accumulation": ([*SMALL, "--trainer.accumulate_grad_batches", "2"], "accumulate_grad_batches=2 disagrees"),
    "a word for a mode": ([*SMALL, "--wandb", "sometimes"], "sometimes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_with_code_2_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    arguments, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIPDP_DATA", raising=False)
    mode = [] if "--wandb" in arguments else ["--wandb", "offline"]
    outcome = lipdp("fit", *arguments, *mode, "--run_dir", "runs/mine")
    errors = [line for line in outcome.err.splitlines() if line.startswith("lipdp fit: ")]
    assert outcome.code == 2 and len(errors) == 1, outcome.err
    assert expected in outcome.err and "HINT" in outcome.err and "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_yaml_that_is_none_and_keys_that_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path(QUICKSTART).read_text()
    cases = {"a: [1,\n b: {": "bad.yaml", text + "\nfoo: 3\n": "foo", text.replace("scaling:", "scalinng:"): "scalinng"}
    for content, expected in cases.items():
        (tmp_path / "bad.yaml").write_text(content)
        outcome = fit(Path("run"), "--config", "bad.yaml")
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and expected in outcome.err + "bad.yaml"
        assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


# ---- help


def test_help_comes_without_torch() -> None:
    code = (
        "import sys; from lipdp_lightning.cli import main; code = main(['--help']); "
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("fit", "test", "certify", "budget", "report"))


def test_help_of_fit_and_the_complete_configuration() -> None:
    outcome = lipdp("fit", "--help")
    assert outcome.code == 0 and outcome.err == ""
    places = [outcome.out.index(key) for key in ("--run_dir", "--privacy.epsilon", "--model.network ", "--data ")]
    assert places == sorted(places) and outcome.out.index("--optimizer ") > places[-1]
    assert "--trainer.max_steps" not in outcome.out and "known subclasses" not in outcome.out
    assert outcome.out.count("\n") < 300
    complete = lipdp("fit", "--help-all")
    assert complete.code == 0 and "--trainer.max_steps" in complete.out and "known subclasses" in complete.out
    options = {key for key in re.findall(r"^  (--[\w.]+)", complete.out, re.MULTILINE) if "trainer" not in key}
    one = lipdp("fit", "--model.network.help", "lipdp_lightning.models.MLP")
    assert one.code == 0 and "input_shape" in one.out
    assert options <= set(re.findall(r"^  (--[\w.]+)", outcome.out, re.MULTILINE)), "no option got lost"
    outcome = lipdp("fit", "--config", QUICKSTART, "--print_config")
    assert outcome.code == 0 and yaml.safe_load(outcome.out)["privacy"]["epsilon"] == 3.0


def test_an_unknown_command_and_none_at_all() -> None:
    assert lipdp("train").code == 2 and "HINT" in lipdp("train").err
    assert lipdp().code == 2 and "commands:" in lipdp().out


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_of_a_logger_that_cannot_be_written_ends_in_a_line_that_says_what_is_safe(tmp_path: Path) -> None:
    """The file is smaller than the configuration, and is no file of ours."""
    run_dir = tmp_path / "run"
    with files_of_at_most(3200):
        outcome = fit(run_dir, *SMALL)
    assert not (run_dir / "steps.txt").read_text() and len((run_dir / "config.yaml").read_bytes()) < 3200
    assert outcome.code == 2 and outcome.err.splitlines()[-1] == (
        f"lipdp fit: a file of the run in {run_dir} cannot be written: File too large. Everything up to the last "
        "checkpoint is kept. HINT: raise the limit of a file's size (ulimit -f), then run the same command again."
    )
    assert fit(run_dir, *SMALL).code == 0


def test_a_report_that_cannot_be_written_is_written_by_the_command_that_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with files_of_at_most(20_000):
        outcome = fit(run_dir, *SMALL)
    assert outcome.code == 2 and "report.html cannot be written: File too large" in outcome.err
    assert f"then write it by `lipdp report --run_dir {run_dir}`" in outcome.err and "same command" not in outcome.err
    assert lipdp("report", "--run_dir", run_dir).code == 0 and (run_dir / "report.html").exists()
