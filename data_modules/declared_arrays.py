"""Defines `DeclaredArrays`: private rows of numbers or images in memory, in a dataset or in shards."""

from __future__ import annotations

from lipdp_lightning.data_modules.array_rows import gives_a_row_again, read_rows
from lipdp_lightning.data_modules.array_schema import ArraySchema
from lipdp_lightning.data_modules.base import GroupedRows, Rows
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.declared_rows import GivenRows
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.tar_shards import TarRecords


class DeclaredArrays(GivenRows):
    """Private rows of numbers: arrays `(x, y)`, a dataset, or records with named fields; `PrivateData.of` makes it."""

    scale, offset = 2 / 255, -1.0

    schema: ArraySchema

    def declared_by(self, declaration: Declaration) -> tuple[ArraySchema, int]:
        return declaration.array_schema()

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
        options = {"split": split, "eval_batch_size": eval_batch_size, "on_device": on_device}
        heldout = None if heldout_path is None else TarRecords(heldout_path)
        super().__init__(
            TarRecords(path), Declaration.of(schema), heldout, test_fraction, validation_fraction, **options
        )

    def where(self, part: str) -> str:
        return str(self.part(part).path)
