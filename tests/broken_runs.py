"""Broken trainings whose private data can be seen outside of the releases that the ledger counts."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from neighbouring_runs import ROWS, OneLarge, Pair, dropped_inputs, network, one_layer
from small_runs import make_module
from torch import Tensor, nn

from lipdp_lightning.audit.paired_runs import TranscribedStrategy
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.training import PrivateModule


@dataclass(frozen=True)
class BrokenRun:
    """Options of the plan and of the comparison, and a part of the fault that has to be found."""

    says: str
    options: Mapping[str, Any]
    plan: Mapping[str, Any] = field(default_factory=dict)


def of_kind(kind: type[PrivateModule], build: Callable[[], nn.Module] = network) -> Callable[[], PrivateModule]:
    return lambda: make_module(kind=kind, network=build())


# ---- modules


class LogsTheBatch(PrivateModule):
    """A metric of the batch, as most modules log one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("train/size", float(len(batch[0])), logger=False)


class LogsToALogger(PrivateModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics({"train/loss": float(outputs["loss"])}, step=self.trainer.global_step)


class Prints(PrivateModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not len(batch[0]):
            print("an empty batch")


class DropsByRow(PrivateModule):
    """Masks that belong to rows of the batch."""

    def _key_dropout(self, ids: Tensor) -> None:
        super()._key_dropout(torch.arange(len(ids)))


class LearnsByTheBatch(PrivateModule):
    """A learning rate in proportion to the root of the rows that were drawn."""

    rows = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rows = len(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * math.sqrt(self.rows / 3)


class StepsLessWhenEmpty(PrivateModule):
    """The learning rate is put back after the step, so that only the weights show what it was."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._rate = 0.1 if len(batch[0]) else 0.05

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.network.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(self._rate / 0.1)


class KeepsAMean(PrivateModule):
    """A buffer that follows the inputs, as normalisation over the batch has one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("seen", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]):
            self.seen.lerp_(batch[0].mean(), 0.1)


class DrawsByTheBatch(PrivateModule):
    """Random numbers for every row from the generator that others use, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.rand(len(batch[0]))


# ---- data modules


class Centred(Pair):
    """The rows' own mean is removed from them, without noise and without a line in the ledger."""

    def transform_batch(self, x: Tensor) -> Tensor:
        return x - self._ready().x.mean(0)


class SkipsEmpty(Pair):
    """Empty batches are left out, and the next one is taken."""

    def bind(self, draw: Callable[[int, int], Tensor], steps_per_epoch: int, chunks: int, start: Any) -> None:
        skipped = 0

        def filled(step: int, chunk: int) -> Tensor:
            nonlocal skipped
            found = draw(step + skipped, chunk)
            while not len(found):
                skipped += 1
                found = draw(step + skipped, chunk)
            return found

        super().bind(filled, steps_per_epoch, chunks, start)


# ---- mechanisms


class DividesByTheDrawn(TranscribedStrategy):
    """The sum is divided by the rows that were drawn, in place of those that are expected."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        assert mechanism is not None
        mechanism.divisor = lambda: float(max(1, mechanism._drawn))  # type: ignore[method-assign]


class FactorOfTheLargest(TranscribedStrategy):
    """All rows of a batch are multiplied by the factor of the largest (thesis, Algorithm 8)."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        assert self.mechanism is not None
        scaling: Any = self.mechanism.scaling
        own = scaling._factors
        scaling._factors = lambda rows, device: own(rows, device).min().expand(rows) if rows else own(rows, device)


class NoiseByTheDrawn(TranscribedStrategy):
    """Noise that is scaled by the rows that were drawn."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        assert mechanism is not None
        stated = mechanism.numbers

        def scaled() -> StepNumbers:
            numbers = stated()
            return replace(numbers, deviations={n: d * (1 + mechanism._drawn) for n, d in numbers.deviations.items()})

        mechanism.numbers = scaled  # type: ignore[method-assign]


class SkipsTheBias(TranscribedStrategy):
    """The gradient of the last bias is put back after the release, without noise."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        assert mechanism is not None
        bias = [p for p in mechanism.model.parameters() if p.dim() == 1][-1]
        privatize = mechanism.privatize_

        def without_the_bias(*arguments: Any) -> None:
            raw = None if bias.grad is None else bias.grad.clone()
            privatize(*arguments)
            bias.grad = raw

        mechanism.privatize_ = without_the_bias  # type: ignore[method-assign]


class HalfTheSensitivity(TranscribedStrategy):
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        mechanism = self.mechanism
        assert mechanism is not None
        stated = mechanism.numbers

        def eighth() -> StepNumbers:
            numbers = stated()
            return replace(numbers, deviations={n: d / 8 for n, d in numbers.deviations.items()})

        mechanism.numbers = eighth  # type: ignore[method-assign]


# ---- callbacks


class StopsAfterRows(Callback):
    """Ends training when fifty-five rows were seen."""

    def __init__(self) -> None:
        self.rows = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows += len(batch[0])
        trainer.should_stop = self.rows >= 55


class RaisesAfterRows(StopsAfterRows):
    """An error that is raised for some data and not for others, or later."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.should_stop:
            raise RuntimeError(f"{self.rows} rows are too many")


class Warns(Callback):
    """A line in the log of the process for every empty batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not len(batch[0]):
            logging.getLogger("my training").warning("an empty batch")


class WritesToStandardError(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        sys.stderr.write(f"{len(batch[0])} rows\n")


class WritesTheRows(Callback):
    """A file with the numbers of the rows that were drawn."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = trainer.strategy.record._path
        with open(Path(path).parent / "drawn.txt", "a") as file:
            file.write(f"{batch[2].tolist()}\n")


BROKEN: dict[str, BrokenRun] = {
    "a metric of the batch": BrokenRun("train/size", {"module": of_kind(LogsTheBatch)}),
    "a loss given to a logger": BrokenRun("train/loss", {"module": of_kind(LogsToALogger)}),
    "the training loss on request": BrokenRun(
        "nonprivate/loss", {"module": lambda: make_module(network=network(), log_nonprivate=True)}
    ),
    "printed when a batch is empty": BrokenRun("printed", {"module": of_kind(Prints)}),
    "division by the drawn sample": BrokenRun("divisor", {"strategy": DividesByTheDrawn}),
    "the factor of the largest row": BrokenRun(
        "times the sensitivity",
        {"strategy": FactorOfTheLargest, "data": OneLarge, "module": lambda: make_module(network=one_layer())},
        {"expected_batch_size": OneLarge.batch_size},
    ),
    "noise by the drawn sample": BrokenRun("deviation of step", {"strategy": NoiseByTheDrawn}),
    "a mean that no ledger counts": BrokenRun("takes no part", {"data": Centred}),
    "dropout keyed by row": BrokenRun(
        "times the sensitivity", {"module": of_kind(DropsByRow, dropped_inputs)}, {"expected_batch_size": ROWS}
    ),
    "empty batches are skipped": BrokenRun("takes no part", {"data": SkipsEmpty}),
    "a learning rate by the batch": BrokenRun("network.0.weight after", {"module": of_kind(LearnsByTheBatch)}),
    "shorter steps from empty batches": BrokenRun("network.0.weight after", {"module": of_kind(StepsLessWhenEmpty)}),
    "a bias without noise": BrokenRun("network.4.bias after", {"strategy": SkipsTheBias}),
    "a buffer that follows the data": BrokenRun("seen after", {"module": of_kind(KeepsAMean)}),
    "random numbers by the batch": BrokenRun("torch's generator", {"module": of_kind(DrawsByTheBatch)}),
    "an eighth of the noise": BrokenRun("times the sensitivity", {"strategy": HalfTheSensitivity}),
    "the end of training follows the data": BrokenRun("releases", {"callbacks": lambda: [StopsAfterRows()]}),
    "an error that follows the data": BrokenRun("releases", {"callbacks": lambda: [RaisesAfterRows()]}),
    "a warning when a batch is empty": BrokenRun("logging is", {"callbacks": lambda: [Warns()]}),
    "sizes on standard error": BrokenRun("standard error is", {"callbacks": lambda: [WritesToStandardError()]}),
    "a file of the drawn rows": BrokenRun("drawn.txt", {"callbacks": lambda: [WritesTheRows()]}),
}
