"""Defines a table of permissions of Android applications, many of which ask for the same ones."""

from __future__ import annotations

from typing import Literal

import torch

from lipdp_lightning.data_modules import codes
from lipdp_lightning.data_modules.base import GroupedRows, Rows
from lipdp_lightning.data_modules.benchmark_tables import NamedTable
from lipdp_lightning.data_modules.csv_table import read_table
from lipdp_lightning.data_modules.encoding import encode
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import ClassLabel, Numeric, TableSchema
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.units import hashed_names


class Android(NamedTable):
    """NATICUSdroid: 86 permissions that an application asks for; 1 is malware. This is the labelled part of a split.

    Many applications share one vector of permissions. The held-out rows are chosen by a hash of the features, so that
    equal vectors are never on both sides.

    Args:
        identical: `together`, as above; or `apart`: a fifth of the rows is set aside for the test by a hash of the
            column `index`, so that equal vectors fall on both sides, as with the random splits of the literature.
    """

    declared_size = 20_531
    file = "naticusdroid/training.csv"
    source = (
        "the UCI Machine Learning Repository as a whole (https://archive.ics.uci.edu/dataset/722), and this part, 70 % "
        "of its rows, as data/training.csv of github.com/ZahrizhalAli/naticusdroid-dsi"
    )
    set_aside = 0.2
    schema = TableSchema(
        ignore=("index",),
        columns=tuple(Numeric(name, 0, 1) for name in codes.ANDROID_PERMISSIONS),
        label=ClassLabel("Result", (("0",), ("1",))),
    )

    def __init__(
        self,
        root: str | None = None,
        identical: Literal["together", "apart"] = "together",
        bins: int = 0,
        crosses: bool = False,
        download: bool = False,
        test_fraction: float = 0.0,
        salt: str = "lipdp",
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        self.apart = identical == "apart"
        if self.apart:
            self.declared_size = round(self.declared_size * (1 - self.set_aside))
            validation_fraction = validation_fraction or 0.0
        super().__init__(
            root, bins, crosses, download, test_fraction, salt, validation_fraction, split, eval_batch_size, on_device
        )

    def _halves(self) -> tuple[Rows, Rows]:
        table = read_table(self._place(self.file), self.schema)
        x, y = encode(table, self.schema)
        test = torch.tensor(hashed_names(table.columns["index"], self.set_aside))
        return (x[~test], y[~test]), (x[test], y[test])

    def load_train(self) -> Rows | GroupedRows:
        return self._halves()[0] if self.apart else super().load_train()

    def load_test(self) -> Rows | None:
        return self._halves()[1] if self.apart else super().load_test()
