"""Measures how long commands take until they start working, over the time to import their libraries.

* start_up: `lipdp fit` on embedded data until its first step is taken, over importing torch and lightning.
* help: `lipdp --help`, over importing torch.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .turns import Worker, environment, say

CONFIG = """\
model:
  network:
    class_path: lipdp_lightning.models.MLP
    init_args: {input_shape: [1, 8, 8], outputs: 10}
data:
  class_path: data_modules.Digits
privacy: {epsilon: 3.0, delta: 1.0e-4, epochs: 30, batch_size: 256}
trainer: {accelerator: cpu, devices: 1, enable_progress_bar: false}
"""
LIMIT = 180.0
IMPORTS = {"start_up": "import torch, lightning", "help": "import torch"}


def measure(quantity: str, repeats: int, threads: int) -> tuple[list[float], list[float]]:
    """Returns ratios to the import, and seconds; both are taken in turn, so that a load affects both."""
    command: Callable[[int], float] = {"start_up": first_step, "help": help_text}[quantity]
    ratios, seconds = [], []
    for _ in range(repeats):
        needed = _finished([sys.executable, "-c", IMPORTS[quantity]], threads)
        seconds.append(command(threads))
        ratios.append(seconds[-1] / needed)
    return ratios, seconds


def help_text(threads: int) -> float:
    return _finished([sys.executable, "-m", "lipdp_lightning.cli", "--help"], threads)


def first_step(threads: int) -> float:
    """Returns the seconds from the start of `lipdp fit` to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        start = time.perf_counter()
        command = [sys.executable, "-m", "lipdp_lightning.bench.start_up", str(config), str(Path(folder) / "run")]
        worker = Worker(command, [environment(threads)])
        try:
            worker.answer(LIMIT)
            return time.perf_counter() - start
        finally:
            worker.close()


def _finished(command: list[str], threads: int) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment(threads), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
    return time.perf_counter() - start


def _fit(config: str, folder: str) -> None:
    """Runs `lipdp fit` until its first step is complete."""
    from ..training.strategy import PrivateStrategy

    whole = PrivateStrategy.optimizer_step

    def first(self: Any, *arguments: Any, **options: Any) -> None:
        whole(self, *arguments, **options)
        say(first_step=True)
        os._exit(0)

    PrivateStrategy.optimizer_step = first  # type: ignore[method-assign]
    sys.argv = ["lipdp", "fit", "--config", config, "--run_dir", folder, "--wandb", "off"]
    runpy.run_module("lipdp_lightning.cli", run_name="__main__")


if __name__ == "__main__":
    _fit(*sys.argv[1:])
