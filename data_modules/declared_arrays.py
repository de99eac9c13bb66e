"""Defines `DeclaredArrays`: private rows of numbers or images in memory, in a dataset or in shards."""

from __future__ import annotations

from typing import Any

from lipdp_lightning.data_modules.array_rows import gives_a_row_again, read_rows
from lipdp_lightning.data_modules.base import GroupedRows, PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import ClassLabel
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.tar_shards import TarRecords


class DeclaredArrays(PrivateDataModule):
    """Private rows of numbers; `PrivateData.of` makes it.

    Args:
        source: arrays `(x, y)`, a torch, torchvision or Hugging Face dataset, or records with named fields.
        declaration: what is public about a row.
        heldout: rows published as held out; without them a fifth of the rows is held out.
        test_fraction: the share of the rows to set aside for the test; settings are then chosen on the validation rows.
        validation_fraction: the share of the rows to hold out; 0 if rows were published as held out.
        options: those of every data module.
    """

    heldout_share = 0.2

    def __init__(
        self,
        source: Any,
        declaration: Declaration,
        heldout: Any = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        **options: Any,
    ) -> None:
        published = validation_fraction is None and heldout is not None
        super().__init__(0.0 if published else validation_fraction, **options)
        self.source, self.heldout, self.test_fraction = source, heldout, test_fraction
        self.schema, self.declared_size = declaration.array_schema()
        self.grouping, self.input_shape = self.schema.grouping, self.schema.shape
        self.input_bound = box_norm(self.input_shape, -1.0, 1.0)
        self.scale, self.offset = 2 / 255, -1.0
        if isinstance(self.schema.label, ClassLabel):
            self.num_classes = len(self.schema.label.values)
            self.task = "binary" if self.num_classes == 2 else "classification"
        else:
            self.task, self.target_bound = "regression", 1.0

    def where(self, part: str) -> str:
        return f"{type(self.source).__name__}, {part} rows"

    def load_train(self) -> Rows | GroupedRows:
        if not gives_a_row_again(self.source):
            raise refusal(
                f"{self.where('training')}: a row is another one when it is read again",
                "leave random transforms out; views are drawn by callbacks.AugmentationMultiplicity",
            )
        return read_rows(self.source, self.schema, self.where("training"))

    def load_test(self) -> Rows | None:
        if self.heldout is None:
            return None
        rows = read_rows(self.heldout, self.schema, self.where("test"))
        return rows[0], rows[1]

    def declarations(self) -> list[str]:
        label = self.schema.label
        return [self.schema.describe(), label.sentence().rstrip(".")]


class TarShards(DeclaredArrays):
    """Records in tar files as WebDataset writes them: `0001.jpg` and `0001.cls` are the fields of record `0001`.

    Args:
        path: a tar file, or several as `shard-{000..003}.tar`.
        schema: a YAML file that declares a row, or the same keys in place; `features` and `label` name fields.
        heldout_path: tar files of rows published as held out; without them a fifth of the rows is held out.
        test_fraction: the share of the rows to set aside for the test; settings are then chosen on the validation rows.
    """

    def __init__(
        self,
        path: str,
        schema: Declaration | str,
        heldout_path: str | None = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        heldout = None if heldout_path is None else TarRecords(heldout_path)
        options = {"split": split, "eval_batch_size": eval_batch_size, "on_device": on_device}
        super().__init__(
            TarRecords(path), Declaration.of(schema), heldout, test_fraction, validation_fraction, **options
        )
        self.path, self.heldout_path = path, heldout_path

    def where(self, part: str) -> str:
        return str(self.heldout_path if part == "test" else self.path)
