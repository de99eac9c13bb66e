"""Rows of a project's own data: a DataLoader, a Dataset, a pair of tensors or a LightningDataModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ..bounds.losses import Loss
from ..data_modules.base import PrivateDataModule
from ..data_modules.poisson import InMemoryRows
from ..data_modules.row_checks import check_declared_size
from ..training.withheld import withholding
from .recorded_step import Key, tensors_of

LARGEST_ENTRY = 10.0
"""The root of the mean square of a row's entries above which a row is scaled down, if no bound is given."""

_AT_ONCE = 1024
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True, eq=False)
class GivenRows:
    """Training rows as a project has them, and the module that holds its other rows.

    Attributes:
        rows: A data set whose items are rows, as tuples or dictionaries.
        batch_size: The number of rows in a batch of the project's own loader, if it has one.
        module: The project's LightningDataModule, whose held-out rows are used as they are.
        loader: The project's loader, if it has given one.
    """

    rows: Dataset[Any]
    batch_size: int | None = None
    module: lightning.LightningDataModule | None = None
    loader: DataLoader[Any] | None = None

    @classmethod
    def of(cls, data: Any) -> GivenRows:
        """Returns the rows of a DataLoader, a Dataset, a pair of tensors or arrays, or a LightningDataModule.

        Raises:
            ValueError: If their rows cannot be drawn one by one.
        """
        if isinstance(data, lightning.LightningDataModule):
            return cls._of_module(data)
        if isinstance(data, DataLoader):
            return cls._of_loader(data)
        if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(p, Tensor | np.ndarray) for p in data):
            return cls(TensorDataset(*map(torch.as_tensor, data)))
        if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise ValueError(
                f"the data is a {type(data).__name__}, whose rows cannot be drawn one by one, each with the plan's "
                "probability. HINT: give a Dataset with __getitem__ and __len__, a DataLoader of one, a pair of "
                "tensors (x, y), a LightningDataModule or a PrivateDataModule."
            )
        return cls(data)

    @classmethod
    def _of_module(cls, module: lightning.LightningDataModule) -> GivenRows:
        own = [
            name
            for name in _BATCH_HOOKS
            if getattr(type(module), name) is not getattr(lightning.LightningDataModule, name)
        ]
        if own:
            raise ValueError(
                f"{type(module).__name__}.{own[0]} changes batches, and a row must not depend on the others in its "
                "batch. HINT: change rows one by one in the data set; callbacks.AugmentationMultiplicity draws views."
            )
        module.prepare_data()
        module.setup("fit")
        loader = module.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"{type(module).__name__}.train_dataloader returns a {type(loader).__name__}. HINT: return one "
                "DataLoader; the plan's sampler draws from its data set."
            )
        found = cls._of_loader(loader)
        return cls(found.rows, found.batch_size, module, loader)

    @classmethod
    def _of_loader(cls, loader: DataLoader[Any]) -> GivenRows:
        problems = []
        if loader.collate_fn is not default_collate:
            problems.append(
                "the loader has a collate_fn of its own, which may mix rows of a batch. HINT: do its work row by row, "
                "in the data set's __getitem__, and leave collate_fn out."
            )
        usual = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (
            RandomSampler,
            SequentialSampler,
        )
        if not usual:
            problems.append(
                f"the loader draws by {type(loader.sampler).__name__}, and the guarantee holds for rows that are drawn "
                "independently, each with the plan's probability. HINT: leave the sampler out; class_weights of the "
                "loss weigh classes."
            )
        if problems:
            raise ValueError("\n".join(problems))
        return cls(cls.of(loader.dataset).rows, loader.batch_size, None, loader)

    def template(self) -> Any:
        """Returns a batch of one row, for its structure, shapes and types; its values are not to be used."""
        if len(self.rows) < 1:  # type: ignore[arg-type]
            raise ValueError("the training data holds no row. HINT: fill it before privatize() is called.")
        with withholding():
            template = default_collate([self.rows[0]])
        if not tensors_of(template):
            raise ValueError(
                f"an item of the data set is a {type(self.rows[0]).__name__} without tensors. "
                "HINT: return (x, y), or a dictionary of tensors."
            )
        return template

    def make_up(self, rows: int, generator: torch.Generator, classes: int) -> Any:
        """Returns a batch of random rows of the structure, shapes and types of this data."""
        template = self.template()

        def made(value: Any) -> Any:
            return _random(value, rows, generator, classes) if isinstance(value, Tensor) else [""] * rows

        if isinstance(template, Mapping):
            return {key: made(value) for key, value in template.items()}
        return type(template)(made(value) for value in template)

    def tensors(self, x: Key, y: Key) -> tuple[Tensor, Tensor]:
        """Returns two fields of all rows."""
        if isinstance(self.rows, TensorDataset):
            fields = self.rows.tensors
            return fields[int(x)], fields[int(y)]
        parts: list[dict[Key, Tensor]] = []
        count = len(self.rows)  # type: ignore[arg-type]
        with withholding():
            for start in range(0, count, _AT_ONCE):
                batch = default_collate([self.rows[i] for i in range(start, min(start + _AT_ONCE, count))])
                parts.append(tensors_of(batch))
            return torch.cat([part[x] for part in parts]), torch.cat([part[y] for part in parts])


def classes_of(outputs: Tensor) -> int:
    """Returns the number of classes that outputs tell apart: those along their first axis after the rows."""
    return outputs.shape[1] if outputs.dim() > 1 else 1


def _random(like: Tensor, rows: int, generator: torch.Generator, classes: int) -> Tensor:
    shape = (rows, *like.shape[1:])
    if like.is_floating_point():
        return torch.rand(shape, generator=generator).to(like.dtype)
    top = 256 if like.dtype == torch.uint8 and like.dim() > 1 else 2 if like.dtype == torch.bool else classes
    return torch.randint(0, top, shape, generator=generator).to(like.dtype)


class AdoptedRows(PrivateDataModule):
    """The training rows of a project under the plan's sampler, and its held-out rows as they are.

    Args:
        given: The rows as the project has them.
        x: The field that the network reads.
        y: The field of the targets.
        declared_size: N, the declared number of training rows.
        loss: The loss, which tells the kind of targets.
        outputs: The number of outputs of the network, along their first axis after the rows.
        input_bound: The largest norm of a row.
    """

    def __init__(
        self, given: GivenRows, x: Key, y: Key, declared_size: int, loss: Loss, outputs: int, input_bound: float
    ) -> None:
        super().__init__()
        self.given, self._fields, self.declared_size, self.input_bound = given, (x, y), declared_size, input_bound
        template = tensors_of(given.template())
        self.input_shape = tuple(template[x].shape[1:])
        self.task = loss.task or "regression"
        self.num_classes = outputs if self.task == "classification" else None
        self._held_out: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Takes the training rows into memory once, and sets up the project's module for another stage."""
        if self.given.module is not None and stage not in (None, "fit"):
            self.given.module.setup(stage)
        if self._train is not None:
            return
        x, y = self.given.tensors(*self._fields)
        check_declared_size("the training data", len(x), self.declared_size)
        x = x if x.dtype in (torch.uint8, torch.float32) else x.to(torch.float32)
        y = y.to(torch.int64) if self.task == "classification" else y.to(torch.float32)
        if self.num_classes is not None and bool(((y < 0) | (y >= self.num_classes)).any()):
            raise ValueError(
                f"a label is not one of the network's {self.num_classes} classes, 0 to {self.num_classes - 1}. "
                "HINT: correct the data set, or use one output for each class."
            )
        self._train = InMemoryRows(x.contiguous(), y.contiguous())

    def made_up_batch(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Returns zeros of the shapes and types of a batch."""
        known = self._ready()
        return torch.zeros((rows, *known.x.shape[1:])), known.y.new_zeros((rows, *known.y.shape[1:]))

    @property
    def holds_rows_out(self) -> bool:
        """True if the project has a loader of validation rows, from which metrics come."""
        return bool(self.val_dataloader())

    def hold_out(self, **loaders: Any) -> None:
        """Takes loaders of held-out rows by their stage: validation, test or prediction."""
        self._held_out |= loaders

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch: rows are what the project's data set makes of them."""
        return batch

    def _own(self, stage: str, name: str) -> Any:
        if stage in self._held_out:
            return self._held_out[stage]
        module = self.given.module
        if module is None or getattr(type(module), name) is getattr(lightning.LightningDataModule, name):
            return []
        return getattr(module, name)()

    def val_dataloader(self) -> Any:
        """Returns the project's own loader of validation rows; an empty list if it has none."""
        return self._own("validation", "val_dataloader")

    def test_dataloader(self) -> Any:
        """Returns the project's own loader of test rows; an empty list if it has none."""
        return self._own("test", "test_dataloader")

    def predict_dataloader(self) -> Any:
        """Returns the project's own loader of rows to predict; an empty list if it has none."""
        return self._own("prediction", "predict_dataloader")
