"""`PrivateDataModule`: in-memory rows, public declarations, batches chosen by the plan's Poisson sampler."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data_modules.checks import check_declarations, check_declared_size, check_rows
from data_modules.files import refusal
from data_modules.poisson import Batch, Draw, InMemoryRows, PlannedBatches, SequentialBatches, loader
from data_modules.splits import Split, checked_split, hashed_split

Rows = tuple[Tensor, Tensor]


def box_norm(shape: tuple[int, ...], low: float, high: float) -> float:
    """The largest norm of an array of that shape with entries in [low, high]."""
    return math.sqrt(math.prod(shape)) * max(abs(low), abs(high))


class PrivateDataModule(lightning.LightningDataModule):
    """A data set whose rows are private and whose declarations are public.

    A subclass declares the attributes below and implements `load_train`, and `load_validation` or `load_test`
    where rows were published as held out. Everything it declares is a constant known without looking at the
    private rows; in particular N is `declared_size`, never a length: neighbouring data sets differ in length.

    Every batch, in training and in evaluation, is `(x, y, ids)`. Features are float32, or uint8 for images:
    those are turned into `x * scale + offset` on the device, batch by batch.

    Args:
        validation_fraction: share of the training rows to hold out, chosen record by record
            (`data_modules.splits`). None takes the class's `heldout_share`. Above 0 it replaces the published
            held-out rows as the validation set, so that nothing is selected on the test set.
        split: `split(x, y) -> bool mask of held-out rows`, instead of the hash; must decide per record, and
            `validation_fraction` must state the share it holds out.
        eval_batch_size: rows per batch in validation, test and prediction.
        pin_memory: for training on an accelerator.
    """

    input_shape: tuple[int, ...]
    task: str
    declared_size: int
    num_classes: int | None = None
    target_bound: float | None = None
    # a bound on a row's norm that follows from the declarations; clipping to a smaller one is up to the user
    input_bound: float | None = None
    scale: float = 1.0
    offset: float = 0.0
    heldout_share: float = 0.0

    def __init__(
        self,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.validation_fraction = self.heldout_share if validation_fraction is None else validation_fraction
        self.split = split
        self.eval_batch_size = eval_batch_size
        self.pin_memory = pin_memory
        self._train: InMemoryRows | None = None
        self._validation: InMemoryRows | None = None
        self._test: InMemoryRows | None = None
        self._planned: PlannedBatches | None = None
        self._fingerprint: bytes | None = None

    # ---- what a subclass provides

    def load_train(self) -> Rows:
        """The private rows `(x, y)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement load_train() -> (x, y)")

    def load_validation(self) -> Rows | None:
        """Rows published for validation, used when `validation_fraction` is 0, else the test rows."""
        return None

    def load_test(self) -> Rows | None:
        """Rows published as held out, used by `test` and `predict`; without any, the validation rows are."""
        return None

    def declarations(self) -> list[str]:
        """Further lines for `describe`: ranges, categories, constants."""
        return []

    # ---- public facts

    @property
    def dataset_size(self) -> int:
        """N of the plan: the declared number of training rows left after the declared held-out share."""
        return round(self.declared_size * (1 - self.validation_fraction))

    @property
    def num_outputs(self) -> int:
        """Outputs a network needs: one per class, or one logit or value."""
        return int(self.num_classes or 0) if self.task == "classification" else 1

    def describe(self) -> str:
        """What was declared about this data set, for the run's report."""
        bound = "none" if self.input_bound is None else f"{self.input_bound:.6g}"
        kind = f"{self.num_classes} classes" if self.task == "classification" else self.task
        share = self.validation_fraction
        if not share:
            held_out = "held out: the published rows, if any"
        else:
            held_out = f"held out: {share:g} of the training rows, " + (
                "by the given per-record split" if self.split else "by a public hash of each record's content"
            )
        lines = [
            f"{type(self).__name__}: {kind}, {self.declared_size} rows declared, N = {self.dataset_size}",
            f"input: shape {tuple(self.input_shape)}, norm bound {bound}",
            f"bytes become x * {self.scale:g} + {self.offset:g}; floats are used as they are",
            held_out,
            *self.declarations(),
            "every constant above is declared; nothing was estimated from private data",
        ]
        return "\n".join(lines)

    # ---- set-up

    def setup(self, stage: str | None = None) -> None:
        """Load, check and split once, whatever the stage."""
        if self._train is not None:
            return
        name = type(self).__name__
        check_declarations(
            name,
            task=getattr(self, "task", None),
            num_classes=self.num_classes,
            target_bound=self.target_bound,
            declared_size=getattr(self, "declared_size", None),
            validation_fraction=self.validation_fraction,
        )
        x, y = self._checked(f"{name}, training rows", self.load_train())
        check_declared_size(name, len(x), self.declared_size)
        test = self.load_test()
        self._test = None if test is None else InMemoryRows(*self._checked(f"{name}, test rows", test))
        if self.validation_fraction > 0:
            (x, y), validation = self._hold_out(x, y)
            self._validation = InMemoryRows(*validation)
        elif (published := self.load_validation()) is not None:
            self._validation = InMemoryRows(*self._checked(f"{name}, validation rows", published))
        else:
            self._validation = self._test
        self._train = InMemoryRows(x, y)

    def _checked(self, name: str, rows: Rows) -> Rows:
        check_rows(
            name,
            *rows,
            input_shape=self.input_shape,
            task=self.task,
            num_classes=self.num_classes,
            target_bound=self.target_bound,
        )
        return rows[0].contiguous(), rows[1].contiguous()

    def _hold_out(self, x: Tensor, y: Tensor) -> tuple[Rows, Rows]:
        share = self.validation_fraction
        mask = checked_split(x, y, self.split) if self.split else hashed_split(x, share)
        held_out, kept = int(mask.sum()), int((~mask).sum())
        # N follows from the declared share: a custom split keeps to it, up to four standard deviations
        slack = 0.05 * share * len(x) + 4 * math.sqrt(len(x) * share * (1 - share))
        if not held_out or not kept or (self.split and abs(held_out - share * len(x)) > slack):
            raise refusal(
                f"{type(self).__name__}: the split holds out {held_out} of {len(x)} rows, "
                f"and the declared share is {share:g}",
                "set validation_fraction to the share the split holds out",
            )
        return (x[~mask], y[~mask]), (x[mask], y[mask])

    def _ready(self) -> InMemoryRows:
        self.setup()
        assert self._train is not None
        return self._train

    # ---- for the sampler and the noise key

    @property
    def rows(self) -> int:
        """Training rows that exist. Private: only the Poisson sampler, which draws among them, reads it."""
        return len(self._ready())

    def fingerprint(self) -> bytes:
        """SHA-256 of the training tensors and their public transform, computed once.

        It enters the noise key, so that a resume on changed data never repeats noise. It is a function of
        private rows: keep it out of logs and reports.
        """
        if self._fingerprint is None:
            rows = self._ready()
            digest = hashlib.sha256(repr((self.scale, self.offset)).encode())
            for tensor in (rows.x, rows.y):
                digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
                digest.update(tensor.numpy().data)
            self._fingerprint = digest.digest()
        return self._fingerprint

    def bind(self, draw: Draw, steps_per_epoch: int, chunks: int, start_step: Callable[[], int]) -> None:
        """Take the plan's sampler: `draw(step, chunk)` gives the row ids of a micro-batch, possibly none."""
        self._planned = PlannedBatches(draw, steps_per_epoch, chunks, start_step)

    # ---- loaders

    def train_dataloader(self) -> DataLoader[Batch]:
        """Micro-batches in the order of the plan: all chunks of a step, then the next step."""
        if self._planned is None:
            raise refusal(
                f"{type(self).__name__} has no sampler: shuffled batches are not what the accountant assumes",
                "train through the private Strategy, which calls bind() with the Poisson sampler of its plan",
            )
        return loader(self._ready(), self._planned, self.pin_memory)

    def _sequential(self, rows: InMemoryRows) -> DataLoader[Batch]:
        return loader(rows, SequentialBatches(len(rows), self.eval_batch_size), self.pin_memory)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """The held-out rows in order; none if the data set has none."""
        self._ready()
        return [] if self._validation is None else self._sequential(self._validation)

    def test_dataloader(self) -> DataLoader[Batch]:
        """The published test rows in order, or the validation rows where none were published."""
        self._ready()
        rows = self._test or self._validation
        if rows is None:
            raise refusal(
                f"{type(self).__name__} has no held-out rows",
                "set validation_fraction, or implement load_test",
            )
        return self._sequential(rows)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The same rows as `test_dataloader`."""
        return self.test_dataloader()

    def transform_batch(self, x: Tensor) -> Tensor:
        """`x * scale + offset` for bytes, with public constants; floats are returned as they are."""
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.offset)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Apply `transform_batch` on the device the batch has arrived at."""
        x, *rest = batch
        return (self.transform_batch(x), *rest)
