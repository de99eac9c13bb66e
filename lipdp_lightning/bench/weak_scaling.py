"""Measures weak scaling: the time of a private step on one process beside that on several, with the same batch for
each.

Both worlds are started together and take turns, so that both meet the machine in the same state; while one works, the
other waits in a read. Every process has one thread and is bound to one processor. The steps are those of
PrivateStrategy: Poisson sample, certificate, noise, the one sum over processes, update and projection.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from ..privacy.plan import PrivacyPlan
from ..training import PrivateModule, PrivateStrategy
from .certificate_cost import MODELS
from .trained import RandomRows
from .turns import Steps, Worker, bind_to_processors, environment

STEPS_PER_TURN = 8
WARM_UP = 2


@dataclass(frozen=True)
class WeakScaling:
    """Medians over the steps of all turns, in seconds of wall time.

    ``efficiency`` is the median over turns of the ratio of both worlds' medians in that turn, and ``lowest`` and
    ``highest`` are the quartiles of these ratios. ``load`` is the machine's load average before the measurement.
    """

    model: str
    batch_size: int
    processes: int
    turns: int
    steps: int
    one: float
    many: float
    efficiency: float
    lowest: float
    highest: float
    processors: int
    load: float

    @property
    def is_quiet(self) -> bool:
        """Returns whether every process can have had a processor of its own."""
        return self.processes + self.load <= self.processors + 0.5


class Turns(Callback):
    """Times steps on rank 0, which takes the orders; the other ranks wait for it in the sum over processes."""

    def __init__(self) -> None:
        self._steps = Steps()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self._steps.between()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._steps.end()


def work(model: str, batch_size: int, processes: int, turns: int) -> None:
    """Runs one process of a world."""
    bind_to_processors(1, int(os.environ.get("LOCAL_RANK", "0")))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    build, shape = MODELS[model]
    data = RandomRows(shape, 16 * batch_size * processes)
    plan = PrivacyPlan.create(
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


def _world(model: str, batch_size: int, processes: int, turns: int) -> Worker:
    """Starts the processes of one world."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = environment(threads=1) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(processes), "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    arguments = json.dumps([model, batch_size, processes, turns])
    command = [sys.executable, "-m", "lipdp_lightning.bench.weak_scaling", arguments]
    return Worker(command, [shared | {"LOCAL_RANK": str(rank)} for rank in range(processes)])


def measure_scaling(model: str, batch_size: int, processes: int, turns: int, limit: float = 1800.0) -> WeakScaling:
    """Returns step times of one process and of several, ``batch_size`` expected examples each, in alternating turns."""
    sizes = (1, processes)
    machine = os.cpu_count() or 1, os.getloadavg()[0]
    worlds = [_world(model, batch_size, size, turns) for size in sizes]
    deadline = time.monotonic() + limit
    times: list[list[list[float]]] = [[], []]
    try:
        for world in worlds:
            world.answer(deadline - time.monotonic())
        for _ in range(turns):
            for taken, world in zip(times, worlds, strict=True):
                left = deadline - time.monotonic()
                taken.append(world.ask(left, steps=STEPS_PER_TURN, warm_up=WARM_UP)["seconds"])
    finally:
        for world in worlds:
            world.close()
    return summarized(model, batch_size, processes, times, *machine)


def summarized(
    model: str,
    batch_size: int,
    processes: int,
    times: Sequence[Sequence[Sequence[float]]],
    processors: int,
    load: float,
) -> WeakScaling:
    """Returns the summary of the seconds of all steps, by world and turn; neighbours in time are compared."""
    ratios = [statistics.median(one) / statistics.median(many) for one, many in zip(*times, strict=True)]
    lowest, middle, highest = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    one, many = (statistics.median(itertools.chain.from_iterable(turns)) for turns in times)
    steps = sum(map(len, times[0]))
    return WeakScaling(
        model, batch_size, processes, len(ratios), steps, one, many, middle, lowest, highest, processors, load
    )  # fmt: skip


def as_row(result: WeakScaling) -> dict[str, Any]:
    return asdict(result) | {"quiet": result.is_quiet}


def printed(row: dict[str, Any]) -> str:
    """Returns the table for the terminal."""
    from ..report.tables import render_table

    headers = ("model", "batch per process", "processes", "step on one s", "step on all s", "efficiency", "quartiles")
    quartiles = f"{row['lowest']:.3f} to {row['highest']:.3f}"
    cells = (*(row[k] for k in ("model", "batch_size", "processes", "one", "many", "efficiency")), quartiles)
    text = render_table(headers, [cells], title="Weak scaling of private steps") + (
        f"\nwall time, medians of {row['steps']} steps; efficiency, median of the ratios of {row['turns']} turns of "
        f"{STEPS_PER_TURN} steps, which alternate, and their quartiles; one thread per process; "
        f"processors: {row['processors']}, load average before: {row['load']:.1f}\n"
    )
    if not row["quiet"]:
        text += "the processes had to share processors: this says nothing about their efficiency\n"
    return text


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
