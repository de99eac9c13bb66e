"""Weak scaling: the time of a private step on one process beside that on several, with the same batch for each.

Both worlds are started together and take turns, so that both meet the machine in the same state; while one
works, the other waits in a read. Every process has one thread and is bound to one processor. The steps are those
of PrivateStrategy: Poisson sample, certificate, noise, the one sum over processes, update and projection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from data_modules.base import PrivateDataModule, box_norm

from ..privacy.plan import PrivacyPlan
from ..training import PrivateModule, PrivateStrategy
from .certificate import MODELS

STEPS_PER_TURN = 8
WARM_UP = 2
_MARK = "turn "
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class WeakScaling:
    """Medians over the steps of all turns, in seconds of wall time; ``efficiency`` is ``one / many``.

    ``load`` is the machine's before the measurement.
    """

    model: str
    batch_size: int
    processes: int
    turns: int
    steps: int
    one: float
    many: float
    efficiency: float
    processors: int
    load: float


class RandomImages(PrivateDataModule):
    """Random images with random labels, enough of them for a small sample rate."""

    task = "classification"
    num_classes = 10

    def __init__(self, shape: tuple[int, ...], rows: int) -> None:
        super().__init__()
        self.input_shape, self.declared_size = shape, rows
        self.input_bound = box_norm(shape, 0.0, 1.0)

    def load_train(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(self.declared_size, *self.input_shape, generator=generator)
        return x, torch.randint(10, (self.declared_size,), generator=generator)


class Turns(Callback):
    """Times steps on rank 0; after each turn it reports them, and waits until it is asked for the next one."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._started: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        if self._started is not None:
            self._times.append(now - self._started)
        if trainer.global_step % (WARM_UP + STEPS_PER_TURN) == 0:
            if trainer.global_step:
                _say(self._times[WARM_UP:])
            if not sys.stdin.readline():
                raise EOFError("the measurement has ended")
            self._times, now = [], time.perf_counter()
        self._started = now

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and self._started is not None:
            _say([*self._times, time.perf_counter() - self._started][WARM_UP:])


def _say(times: list[float]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(times)}\n")
    sys.stdout.flush()


def _bind_to_processor(rank: int) -> None:
    """To one each: a lone process would draw its noise on a processor that several processes do not leave idle."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[rank % len(mine)]})


def work(model: str, batch_size: int, processes: int, turns: int) -> None:
    """One process of a world."""
    _bind_to_processor(int(os.environ.get("LOCAL_RANK", "0")))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    build, shape = MODELS[model]
    data = RandomImages(shape, 16 * batch_size * processes)
    plan = PrivacyPlan(
        dataset_size=data.dataset_size, expected_batch_size=batch_size * processes, noise_multiplier=1.0, delta=1e-6,
        steps=turns * (WARM_UP + STEPS_PER_TURN), accountant="rdp", scaling="joint", allocation="global",
    )  # fmt: skip
    module = PrivateModule(build(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    trainer = lightning.Trainer(
        strategy=PrivateStrategy(plan), callbacks=[Turns()], accelerator="cpu", devices=processes, max_steps=plan.steps,
        max_epochs=-1, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)


class _World:
    """The processes of one world; rank 0 is spoken to through pipes."""

    def __init__(self, model: str, batch_size: int, processes: int, turns: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        shared = os.environ | dict.fromkeys(_THREADS, "1") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"WORLD_SIZE": str(processes), "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
        arguments = json.dumps([model, batch_size, processes, turns])
        command = [sys.executable, "-m", "lipdp_lightning.bench.scaling", arguments]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the world
        self._ranks = [
            subprocess.Popen(
                command, env=shared | {"LOCAL_RANK": str(rank)}, stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=self._errors, text=True,
            )
            for rank in range(processes)
        ]  # fmt: skip

    def turn(self) -> list[float]:
        """Let it work for one turn; the seconds of each step."""
        first = self._ranks[0]
        assert first.stdin is not None and first.stdout is not None
        try:
            first.stdin.write("go\n")
            first.stdin.flush()
        except BrokenPipeError:
            pass
        for line in first.stdout:
            if line.startswith(_MARK):
                return [float(t) for t in json.loads(line[len(_MARK) :])]
        self._errors.seek(0)
        raise RuntimeError(f"a process of the measurement failed, or took too long: {self._errors.read()[-2000:]}")

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        self.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()
        self._errors.close()


def measure_scaling(model: str, batch_size: int, processes: int, turns: int, limit: float = 1800.0) -> WeakScaling:
    """Step times of one process and of several, ``batch_size`` expected examples for each, in alternating turns."""
    sizes = (1, processes)
    machine = os.cpu_count() or 1, os.getloadavg()[0]
    worlds = [_World(model, batch_size, size, turns) for size in sizes]
    timer = threading.Timer(limit, lambda: [world.kill() for world in worlds])
    timer.daemon = True
    timer.start()
    times: list[list[float]] = [[], []]
    try:
        for _ in range(turns):
            for taken, world in zip(times, worlds, strict=True):
                taken += world.turn()
    finally:
        timer.cancel()
        for world in worlds:
            world.close()
    one, many = map(statistics.median, times)
    return WeakScaling(model, batch_size, processes, turns, len(times[0]), one, many, one / many, *machine)


def as_row(result: WeakScaling) -> dict[str, Any]:
    return asdict(result)


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
