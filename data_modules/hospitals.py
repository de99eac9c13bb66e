"""Defines a table in which several rows belong to one patient."""

from __future__ import annotations

from typing import ClassVar, Literal

from lipdp_lightning.data_modules import codes
from lipdp_lightning.data_modules.benchmark_tables import NamedTable
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel, Numeric, TableSchema
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.units import Grouping


class DiabetesHospitals(NamedTable):
    """Diabetes patients in 130 US hospitals, 1999-2008: was the patient readmitted? A row is a stay, not a patient.

    The unit of privacy is the patient (`data_modules.units`).

    Args:
        max_rows: the number of stays of one patient that count.
        sampling: `groups` draws patients, and N is their number; `rows` draws stays, and the accountant applies the
            group property of order `max_rows`.
        announced_rows: with `rows`, the declared number of stays left, for a `max_rows` other than 1, 2, 3 or 5.
    """

    file = "diabetes_130us/diabetic_data.csv"
    patients = 71_518
    stays: ClassVar[dict[int, int]] = {1: 71_518, 2: 88_291, 3: 94_630, 5: 99_231}

    def __init__(
        self,
        root: str | None = None,
        max_rows: int = 2,
        sampling: Literal["groups", "rows"] = "groups",
        announced_rows: int | None = None,
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
        rows = self.stays.get(max_rows) if announced_rows is None else announced_rows
        if sampling == "rows" and rows is None:
            raise refusal(f"no number of rows is declared for max_rows = {max_rows}", "give announced_rows")
        self.declared_size = self.patients if sampling == "groups" else int(rows or 0)
        self.schema = TableSchema(
            missing=("?",),
            missing_policy="bucket",
            ignore=codes.HOSPITAL_IGNORED,
            grouping=Grouping("patient_nbr", max_rows, sampling),
            columns=(
                *(Numeric(name, low, high) for name, (low, high) in codes.HOSPITAL_RANGES.items()),
                *(Categorical(name, values) for name, values in codes.HOSPITAL_CATEGORIES.items()),
            ),
            label=ClassLabel("readmitted", (("NO",), (">30", "<30"))),
        )
        super().__init__(
            root, bins, crosses, download, test_fraction, salt, validation_fraction, split, eval_batch_size, on_device
        )
