"""Defines `PrivateDataModule`: private rows, public declarations, and batches by the plan's Poisson sampler."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import (
    SHARE_OF_MEMORY,
    Batch,
    Draw,
    InMemoryRows,
    OnDevice,
    PlannedBatches,
    SequentialBatches,
    loader,
)
from lipdp_lightning.data_modules.prepare import GroupedRows as GroupedRows
from lipdp_lightning.data_modules.prepare import Rows as Rows
from lipdp_lightning.data_modules.prepare import prepare
from lipdp_lightning.data_modules.row_checks import check_declarations
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.units import Grouping, Groups

if TYPE_CHECKING:
    from lipdp_lightning.privacy.statistics import Terms


def box_norm(shape: tuple[int, ...], low: float, high: float) -> float:
    """Returns the largest norm of an array of that shape with entries in [low, high]."""
    return math.sqrt(math.prod(shape)) * max(abs(low), abs(high))


class PrivateDataModule(lightning.LightningDataModule):
    """A data set whose rows are private and whose declarations are public.

    A subclass declares the attributes below and implements `load_train`, and `load_validation` or `load_test` where
    rows were published as held out. Everything it declares is a constant known without looking at the private rows; in
    particular N is `declared_size`, never a length, because neighbouring data sets differ in length.

    Every batch, in training and in evaluation, is `(x, y, ids)`. Features are float32, or uint8 for images, which
    become `x * scale + offset` on the device, batch by batch, or int64 for tokens of a declared `vocabulary`.

    The unit of privacy is the row, or with a `grouping` all rows of one group (`data_modules.units`); then `load_train`
    also returns the group of every row, and `declared_size` counts what is drawn: the rows left after the excess rows
    of large groups are dropped, or the groups.

    Args:
        validation_fraction: the share of the training rows to hold out, chosen record by record
            (`data_modules.splits`). None takes the class's `heldout_share`. Above 0 it replaces the published held-out
            rows as the validation set, so that nothing is selected on the test set.
        split: a function `split(x, y)` that returns a boolean mask of held-out rows, in place of the hash. It must
            decide per record, and `validation_fraction` must state the share that it holds out.
        eval_batch_size: rows per batch in validation, test and prediction.
        on_device: whether the training rows are kept in the memory of a GPU, from where a step takes its sample; with
            'auto', they are if their declared size fits into half of what is free. Other rows are copied batch by batch
            from pinned memory, for which the host does not wait. Bytes stay bytes until they are on the device.
    """

    input_shape: tuple[int, ...]
    task: str
    declared_size: int
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None  # in the order of the labels, if they have names
    target_bound: float | None = None
    # a bound on a row's norm that follows from the declarations; the user may clip to a smaller one
    input_bound: float | None = None
    # the number of different tokens, of rows that hold tokens; such rows are int64 and reach the network as numbers
    vocabulary: int | None = None
    scale: float = 1.0
    offset: float = 0.0
    heldout_share: float = 0.0
    # share of the rows set aside for the test, in place of published ones, before the validation rows are chosen
    test_fraction: float = 0.0
    # decides which rows are validation rows: another salt holds out others
    salt: str = "lipdp"
    grouping: Grouping | None = None
    # (label, noise multiplier) of each statistic of the private rows, released once and accounted for
    preliminary: tuple[tuple[str, float], ...] = ()
    # whether rows stay in their file and are never copied as a whole
    mapped: bool = False

    def __init__(
        self,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__()
        self.validation_fraction = self.heldout_share if validation_fraction is None else validation_fraction
        if not 0 <= self.validation_fraction < 1:
            raise refusal(
                f"{type(self).__name__}: validation_fraction is {self.validation_fraction}, not in [0, 1)",
                "give the share of the training rows that is held out, such as 0.1",
            )
        if eval_batch_size < 1:
            raise refusal(
                f"{type(self).__name__}: eval_batch_size is {eval_batch_size}, and a batch has at least one row",
                "give the rows of a batch in validation and test, such as 1024",
            )
        self.split = split
        self.eval_batch_size = eval_batch_size
        self.on_device = on_device
        self._copied_to: torch.device | None = None
        self._train: InMemoryRows | None = None
        self._validation: InMemoryRows | None = None
        self._test: InMemoryRows | None = None
        self._planned: PlannedBatches | None = None
        self._groups: Groups | None = None
        self._fingerprint: bytes | None = None

    # ---- what a subclass provides

    def load_train(self) -> Rows | GroupedRows:
        """Returns the private rows `(x, y)`, and with a `grouping` the name of each row's group."""
        raise NotImplementedError(f"{type(self).__name__} must implement load_train() -> (x, y)")

    def load_validation(self) -> Rows | None:
        """Returns the rows published for validation, used when `validation_fraction` is 0, else the test rows."""
        return None

    def load_test(self) -> Rows | None:
        """Returns the rows published as held out, used by `test` and `predict`; None means the validation rows."""
        return None

    def where(self, part: str) -> str:
        """Returns how errors name the training, test or validation rows: the file, if there is one."""
        return f"{type(self).__name__}, {part} rows"

    def declarations(self) -> list[str]:
        """Returns further lines for `describe`: ranges, categories, constants."""
        return []

    # ---- public facts

    @property
    def dataset_size(self) -> int:
        """N of the plan: the declared number of training rows left after the declared held-out share."""
        return round(self.declared_size * (1 - self.test_fraction) * (1 - self.validation_fraction))

    @property
    def unit(self) -> str:
        """The unit that the guarantee protects: `example` or `group`."""
        return "example" if self.grouping is None else "group"

    @property
    def samples_groups(self) -> bool:
        """True if the sampler draws groups, each standing for one of its rows, so that N counts groups."""
        return self.grouping is not None and self.grouping.sampling == "groups"

    @property
    def max_examples_per_unit(self) -> int:
        """The number of examples that one unit may add to one step; the plan must state the same number."""
        return 1 if self.grouping is None else self.grouping.rows_per_unit

    @property
    def num_outputs(self) -> int:
        """The number of outputs that a network needs: one per class, or one logit or value."""
        return int(self.num_classes or 0) if self.task == "classification" else 1

    def describe(self) -> str:
        """Returns what was declared about this data set, for the run's report."""
        bound = "none" if self.input_bound is None else f"{self.input_bound:.6g}"
        kind = f"{self.num_classes} classes" if self.task == "classification" else self.task
        share = self.validation_fraction
        if not share:
            held_out = "held out: the published rows, if any"
        else:
            hashed = "each record's content" if self.grouping is None else "each group's name"
            held_out = f"held out: {share:g} of the training rows, " + (
                "by the given per-record split" if self.split else f"by a public hash of {hashed}"
            )
        drawn = "groups" if self.samples_groups else "rows"
        lines = [
            f"{type(self).__name__}: {kind}, {self.declared_size} {drawn} declared, N = {self.dataset_size}",
            f"input: shape {tuple(self.input_shape)}, norm bound {bound}",
            f"bytes become x * {self.scale:g} + {self.offset:g}; floats are used as they are",
            held_out + (f"; before that {self.test_fraction:g} for the test, likewise" if self.test_fraction else ""),
            "unit of privacy: one row" if self.grouping is None else self.grouping.describe(),
            *self.declarations(),
            "every constant above is declared; "
            + (
                f"{', '.join(label for label, _ in self.preliminary)}: estimated with noise, in the plan's ledger"
                if self.preliminary
                else "nothing was estimated from private data"
            ),
        ]
        return "\n".join(lines)

    # ---- set-up

    def setup(self, stage: str | None = None) -> None:
        """Loads, checks and splits the rows once, whatever the stage."""
        if self._train is not None:
            return
        check_declarations(
            type(self).__name__,
            task=getattr(self, "task", None),
            num_classes=self.num_classes,
            target_bound=self.target_bound,
            declared_size=getattr(self, "declared_size", None),
            validation_fraction=self.validation_fraction,
            test_fraction=self.test_fraction,
        )
        self._train, self._validation, self._test, self._groups = prepare(self)

    def _ready(self) -> InMemoryRows:
        self.setup()
        assert self._train is not None
        return self._train

    # ---- what set-up tries a step on

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one example's target; it is empty for labels and single numbers."""
        return tuple(self._ready().y.shape[1:])

    def made_up_batch(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Returns zeros of the shapes and types of a batch, or None if a subclass changes batches in its own way."""
        if type(self).on_after_batch_transfer is not PrivateDataModule.on_after_batch_transfer:
            return None
        if self.preliminary:  # the shape of a batch is known once they are released
            return None
        known = self._ready()
        x = torch.zeros((rows, *self.input_shape), dtype=known.x.dtype)
        return self.transform_batch(x), torch.zeros((rows, *self.target_shape), dtype=known.y.dtype)

    def made_up_rows(self, rows: int, generator: torch.Generator) -> Batch:
        """Random rows before `transform_batch`, of the shapes and types of the training rows."""
        return self._ready().made_up(rows, generator, None if self.task == "regression" else self.num_classes or 2)

    # ---- for the sampler and the noise key

    @property
    def rows(self) -> int:
        """The private number of training rows (or groups) that exist, which only the Poisson sampler reads."""
        ready = self._ready()
        return len(ready) if self._groups is None else len(self._groups)

    def fingerprint(self) -> bytes:
        """Returns the SHA-256 of the training tensors and their public transform, computed once.

        It enters the noise key, so that a resumed run on changed data never repeats noise. It is a function of private
        rows: keep it out of logs and reports.
        """
        if self._fingerprint is None:
            rows = self._ready()
            digest = hashlib.sha256(repr((self.scale, self.offset)).encode())
            rows.digest_into(digest)
            if self._groups is not None:
                digest.update(repr(self._groups.names).encode() + self._groups.codes.tobytes())
            self._fingerprint = digest.digest()
        return self._fingerprint

    @property
    def declared_bytes(self) -> int:
        """The size in memory of the declared number of rows, labels included; the number that exists is private."""
        rows = self._ready()
        return self.declared_size * (rows.x[:1].nbytes + rows.y[:1].nbytes)

    def place(self, device: torch.device) -> str:
        """Moves the training rows to the device that trains, if they are to be there; returns where they are.

        Raises:
            ValueError: if they are to be there, and stay in their file.
        """
        size = f"{self.declared_bytes / 2**20:.1f} MB by their declared number"
        if device.type != "cuda":
            return f"{'in their file' if self.mapped else 'in memory'}, {size}"
        if self.on_device is True and self.mapped:
            raise refusal(
                f"{type(self).__name__}: on_device is true, and its rows stay in their file",
                "use on_device: auto or false; batches are copied from pinned memory",
            )
        fits = self.declared_bytes <= SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]
        if self.on_device is True or (self.on_device == "auto" and fits and not self.mapped):
            self.fingerprint()  # while they can be read without a copy
            self._train = self._ready().on(device)
            return f"on {device}, {size}"
        self._copied_to = device
        return f"copied to {device} batch by batch, {size}"

    def bind(self, draw: Draw, steps_per_epoch: int, chunks: int, start_step: Callable[[], int]) -> None:
        """Takes the plan's sampler; `draw(step, chunk)` returns the row ids of a micro-batch, possibly none."""
        self._planned = PlannedBatches(lambda t, c: self._rows_of(draw(t, c), t), steps_per_epoch, chunks, start_step)

    def _rows_of(self, drawn: Tensor, step: int) -> Tensor:
        return drawn if self._groups is None else self._groups.rows_at(drawn, step)

    def statistic_terms(self, label: str) -> Terms:
        """Returns the vectors, one per training row, whose mean is the statistic of that label, one of
        `preliminary`.
        """
        raise NotImplementedError(f"{type(self).__name__} declares {label!r} and must implement statistic_terms")

    def use_statistics(self, values: Mapping[str, Tensor]) -> None:
        """Takes the released statistics, before the first step or with the weights of a finished run."""

    # ---- loaders

    def train_dataloader(self) -> DataLoader[Batch]:
        """Returns micro-batches in the order of the plan: all chunks of a step, then the next step."""
        if self._planned is None:
            raise refusal(
                f"{type(self).__name__} has no sampler: shuffled batches are not what the accountant assumes",
                "train through the private Strategy, which calls bind() with the Poisson sampler of its plan",
            )
        return loader(self._ready(), self._planned, self._copied_to)

    @property
    def holds_rows_out(self) -> bool:
        """True if there are rows for metrics: held out, or published as such."""
        self._ready()
        return self._validation is not None or self._test is not None

    def _sequential(self, rows: InMemoryRows) -> DataLoader[Batch]:
        return loader(rows, SequentialBatches(len(rows), self.eval_batch_size), self._copied_to)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """Returns the held-out rows in order; an empty list if the data set has none."""
        self._ready()
        return [] if self._validation is None else self._sequential(self._validation)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Returns the published test rows in order, or the validation rows if none were published."""
        self._ready()
        rows = self._test or self._validation
        if rows is None:
            raise refusal(
                f"{type(self).__name__} has no held-out rows",
                "set validation_fraction, or implement load_test",
            )
        return self._sequential(rows)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Returns the rows of `test_dataloader`."""
        return self.test_dataloader()

    def in_units(self, targets: Tensor) -> Tensor:
        """Returns targets or predictions of a regression in the units in which the label was declared."""
        return targets

    def transform_batch(self, x: Tensor) -> Tensor:
        """Returns `x * scale + offset` for bytes, with public constants; floats are returned unchanged."""
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.offset)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Applies `transform_batch` on the device that the batch has arrived at."""
        x, *rest = batch
        return (self.transform_batch(x), *rest)
