"""Measures weak scaling: the time of a private step on one process beside that on several, with the same batch for
each.

Processors of one machine share its memory and its clock, so that several processes slow each other down even where they
exchange nothing. This is measured too: as many processes at once, each of which trains by itself. What the sums over
processes cost is the difference between the two.

All worlds are started together and take turns, so that all meet the machine in the same state; while one works, the
others wait in a read. Every process has one thread and is bound to one processor. The steps are those of
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
PROCESSOR = "LIPDP_PROCESSOR"


@dataclass(frozen=True)
class WeakScaling:
    """Medians over the steps of all turns, in seconds of wall time.

    ``efficiency`` is the median over turns of the ratio of two medians in that turn, of one process and of many, and
    ``lowest`` and ``highest`` are the quartiles of these ratios. ``alone`` is a step of as many processes at once that
    exchange nothing, and ``beside_apart`` is the efficiency beside theirs. ``load`` is the machine's load average
    before the measurement.
    """

    model: str
    batch_size: int
    processes: int
    turns: int
    steps: int
    one: float
    many: float
    alone: float
    efficiency: float
    beside_apart: float
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
    bind_to_processors(1, int(os.environ[PROCESSOR]))
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


def _world(model: str, batch_size: int, processes: int, turns: int, processor: int = 0) -> Worker:
    """Starts the processes of one world, the first of them on the given processor."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = environment(threads=1) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(processes), "NODE_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    arguments = json.dumps([model, batch_size, processes, turns])
    command = [sys.executable, "-m", "lipdp_lightning.bench.weak_scaling", arguments]
    own = [{"LOCAL_RANK": str(rank), PROCESSOR: str(processor + rank)} for rank in range(processes)]
    return Worker(command, [shared | each for each in own])


def measure_scaling(model: str, batch_size: int, processes: int, turns: int, limit: float = 1800.0) -> WeakScaling:
    """Returns step times of one process, of several, and of several that exchange nothing, in alternating turns.

    Args:
        model: a name of ``MODELS``.
        batch_size: the expected batch size of each process.
        processes: how many there are in the world of several.
        turns: how often each world works.
        limit: seconds after which the measurement is given up.
    """
    machine = os.cpu_count() or 1, os.getloadavg()[0]
    shape = model, batch_size
    contenders = [
        [_world(*shape, 1, turns)],
        [_world(*shape, processes, turns)],
        [_world(*shape, 1, turns, processor) for processor in range(processes)],
    ]
    worlds = list(itertools.chain.from_iterable(contenders))
    deadline = time.monotonic() + limit
    times: list[list[list[float]]] = [[] for _ in contenders]
    try:
        for world in worlds:
            world.answer(deadline - time.monotonic())
        for _ in range(turns):
            for taken, together in zip(times, contenders, strict=True):
                for world in together:
                    world.send(steps=STEPS_PER_TURN, warm_up=WARM_UP)
                answers = [world.answer(deadline - time.monotonic())["seconds"] for world in together]
                taken.append(max(answers, key=statistics.median))
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
    """Returns the summary of the seconds of all steps, by contender and turn; neighbours in time are compared."""
    ones, manys, alones = ([statistics.median(turn) for turn in turns] for turns in times)
    ratios = [one / many for one, many in zip(ones, manys, strict=True)]
    lowest, middle, highest = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    beside_apart = statistics.median(alone / many for alone, many in zip(alones, manys, strict=True))
    one, many, alone = (statistics.median(itertools.chain.from_iterable(turns)) for turns in times)
    steps = sum(map(len, times[0]))
    return WeakScaling(
        model, batch_size, processes, len(ratios), steps, one, many, alone, middle, beside_apart, lowest, highest,
        processors, load,
    )  # fmt: skip


def as_row(result: WeakScaling) -> dict[str, Any]:
    return asdict(result) | {"quiet": result.is_quiet}


def printed(row: dict[str, Any]) -> str:
    """Returns the table for the terminal."""
    from ..report.tables import render_table

    headers = (
        "model",
        "batch per process",
        "processes",
        "on one s",
        "on all s",
        "apart s",
        "efficiency",
        "beside apart",
    )
    columns = ("model", "batch_size", "processes", "one", "many", "alone", "efficiency", "beside_apart")
    text = render_table(headers, [[row[column] for column in columns]], title="Weak scaling of private steps") + (
        f"\nwall time, medians of {row['steps']} steps; apart: as many processes at once that exchange nothing\n"
        f"efficiency: on one / on all, median of {row['turns']} turns of {STEPS_PER_TURN} steps, which alternate "
        f"(quartiles {row['lowest']:.3f} to {row['highest']:.3f}); beside apart: apart / on all\n"
        f"one thread per process; processors: {row['processors']}, load average before: {row['load']:.1f}\n"
    )
    if not row["quiet"]:
        text += "the processes had to share processors: this says nothing about their efficiency\n"
    return text


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))
