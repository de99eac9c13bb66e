"""Progress where the output is no terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest
from small_runs import fit, make_plan

from lipdp_lightning.callbacks import PrivacyAccountant, PrivateProgressBar


def test_a_log_file_gets_lines_with_epsilon_and_held_out_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"enable_progress_bar": True, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    fit(make_plan(), PrivacyAccountant(), PrivateProgressBar(), trainer_options=options)
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d+)/12", line)[1]) for line in lines] == list(range(1, 13))
    assert all(re.search(r"epsilon=\d", line) for line in lines[1:])
    assert all("validation/accuracy=" in line for line in lines[6:]) and "v_num" not in "".join(lines)
    assert re.search(r"  [\d.]+ steps/s  0:00:00 left$", lines[-1])


def test_a_long_run_writes_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(steps=200, expected_batch_size=2)
    fit(plan, PrivateProgressBar(), trainer_options={"enable_progress_bar": True})
    assert 18 <= len(capsys.readouterr().out.splitlines()) <= 22


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_bar_over_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    options = {"enable_progress_bar": True, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    fit(make_plan(), PrivacyAccountant(), PrivateProgressBar(), trainer_options=options)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = text.rstrip().splitlines()[-1]
    assert re.match(r"step ━+ 12/12 epsilon=[\d.]+  validation/accuracy=[\d.]+ ", last), last
    assert "steps/s" in last and re.search(r"\d:\d\d:\d\d$", last)
    assert screen.getvalue().count("\x1b[?25l") == 1, "one bar"


def test_a_bar_is_closed_when_training_fails_and_hides_where_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(PrivateProgressBar):
        def on_validation_end(self, trainer: object, pl_module: object) -> None:
            raise RuntimeError("lost")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    options = {"enable_progress_bar": True, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    with pytest.raises(RuntimeError, match="RuntimeError in on_validation_end"):
        fit(make_plan(), Failing(), trainer_options=options)
    assert screen.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
    monkeypatch.setattr(sys, "stdout", quiet := Terminal())
    hidden = PrivateProgressBar()
    hidden.disable()
    fit(make_plan(), hidden, trainer_options={"enable_progress_bar": True})
    assert quiet.getvalue() == ""
