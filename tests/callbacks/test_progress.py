"""Progress where the output is no terminal."""

from __future__ import annotations

import re

import pytest
from small_runs import fit, make_plan

from lipdp_lightning.callbacks import PrivacyAccountant, PrivateProgressBar


def test_a_log_file_gets_lines_with_epsilon_and_held_out_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"enable_progress_bar": True, "limit_val_batches": 1.0, "check_val_every_n_epoch": 2}
    fit(make_plan(), PrivacyAccountant(), PrivateProgressBar(), trainer_options=options)
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d+)/12", line)[1]) for line in lines] == list(range(1, 13))
    assert all(re.search(r"epsilon=\d", line) for line in lines[1:])
    assert "validation/accuracy=" in lines[-1] and "v_num" not in "".join(lines)


def test_a_long_run_writes_about_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(steps=200, expected_batch_size=2)
    fit(plan, PrivateProgressBar(), trainer_options={"enable_progress_bar": True})
    assert 18 <= len(capsys.readouterr().out.splitlines()) <= 22
