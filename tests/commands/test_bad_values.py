"""One bad value for every key of the configuration: it is refused in a line, or it works; nothing in between."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from command_runs import SMALL, lipdp
from test_bad_input import check, folder, left_behind

from lipdp_lightning.experiment.known_keys import known_keys

__all__ = ["folder"]

VALUES = [".nan", "-1", "0", "1e-320", "1e308", "", "x", "[]", "{}", "null"]
INSIDE = [
    *(f"model.network.init_args.{name}" for name in ("input_shape", "outputs", "hidden", "bias", "zero_init")),
    *(f"data.init_args.{name}" for name in ("validation_fraction", "split", "eval_batch_size", "on_device")),
    *(f"optimizer.init_args.{name}" for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")),
]
LEFT_OUT = {"config", "trainer.max_time"}
KEYS = [key for key in [*known_keys(), *INSIDE] if key not in LEFT_OUT]
SHORT = [*SMALL, "--privacy.steps", "2", "--trainer.enable_progress_bar", "false"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(KEYS)), ids=lambda number: KEYS[number])
def test_a_bad_value_for_a_key(number: int, folder: Path) -> None:
    """Three of the values for each key, others for its neighbours."""
    for step in range(3):
        key, value = KEYS[number], VALUES[(number + 3 * step + step) % len(VALUES)]
        outcome = lipdp("fit", "--run_dir", f"run{step}", "--wandb", "off", *SHORT, f"--{key}={value}")
        if outcome.code == 0:  # it is a value that works
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(print, f"--{key}={value}\n{outcome.err}")
            check(outcome)
            assert not [path for path in left_behind(folder) if path.startswith(f"run{step}")]
