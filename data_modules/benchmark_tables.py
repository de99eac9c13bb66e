"""Declares the tables of the benchmark suites, each by a schema and the name of its file.

Files are looked for under `<root>/tabular/`, plain or gzipped. Ranges and categories are those of each data set's
documentation, or round numbers from common knowledge of the quantity; values outside a range are clipped. Long code
lists are in `data_modules.codes`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from lipdp_lightning.data_modules import codes
from lipdp_lightning.data_modules.csv_table import SchemaTable, read_table
from lipdp_lightning.data_modules.downloads import fetched, how_to_get
from lipdp_lightning.data_modules.embedded import CELL_RANGES
from lipdp_lightning.data_modules.encoding import RawTable
from lipdp_lightning.data_modules.found_files import data_root, find_file
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import Categorical, ClassLabel, NumberLabel, Numeric, TableSchema, expanded
from lipdp_lightning.data_modules.splits import Split


class NamedTable(SchemaTable):
    """A table at a known place under the data root.

    Args:
        root: the data folder; LIPDP_DATA by default.
        bins: the number of equal parts that the declared range of every number is cut into, one-hot coded behind the
            number.
        crosses: whether to one-hot code the joint category of every pair of categories, or binned numbers, as well.
        download: whether to fetch a missing file, if a source with a known checksum exists, and to check one that is
            there.
        test_fraction: the share of the rows to set aside for the test; settings are then chosen on the validation rows.
        salt: decides which rows are validation rows; another salt holds out others, of the same share.
    """

    file: str
    heldout_file: str | None = None
    source = "the UCI Machine Learning Repository"

    def __init__(
        self,
        root: str | None = None,
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
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        self.root, self.download, self.test_fraction, self.salt = root, download, test_fraction, salt
        self.adopt(expanded(self.schema, bins, crosses))

    def _place(self, name: str) -> Path:
        place = f"tabular/{name}"
        hint = f"{type(self).__name__} is published by {self.source}; {how_to_get(place)}, or set LIPDP_DATA"
        root = data_root(self.root, place, hint.removesuffix(", or set LIPDP_DATA"))
        return fetched(root, place, hint) if self.download else find_file(root, place, hint)

    def where(self, part: str) -> str:
        return f"{type(self).__name__}, {self.heldout_file if part == 'test' else self.file}"

    def table(self, part: str) -> RawTable | None:
        file = self.heldout_file if part == "test" else self.file
        return None if file is None else read_table(self._place(file), self.schema)


class Adult(NamedTable):
    """Census income above 50K (adult.names): published training and test files; missing is a category."""

    declared_size = 32_561
    heldout_share = 0.0
    file, heldout_file = "adult/adult.data", "adult/adult.test"
    schema = TableSchema(
        names=(*codes.ADULT_COLUMNS, "income"),
        comment="|",
        missing=("?",),
        missing_policy="bucket",
        # this is a sampling weight of the survey, not a fact about the person
        ignore=("fnlwgt",),
        columns=(
            Numeric("age", 17, 90),
            Numeric("education-num", 1, 16),
            Numeric("capital-gain", 0, 99_999, log=True),
            Numeric("capital-loss", 0, 10_000, log=True),
            Numeric("hours-per-week", 0, 99),
            *(Categorical(name, values) for name, values in codes.ADULT_CATEGORIES.items()),
        ),
        # the published test file ends its labels in a dot
        label=ClassLabel("income", (("<=50K", "<=50K."), (">50K", ">50K."))),
    )


class BreastCancer(NamedTable):
    """Wisconsin diagnostic breast cancer (wdbc.names): 0 benign, 1 malignant."""

    declared_size = 569
    file = "breast_cancer_wisconsin_diagnostic/wdbc.data"
    schema = TableSchema(
        names=("id", "diagnosis", *CELL_RANGES),
        ignore=("id",),
        scale="symmetric",
        columns=tuple(Numeric(name, low, high) for name, (low, high) in CELL_RANGES.items()),
        label=ClassLabel("diagnosis", (("B",), ("M",))),
    )


class DefaultCredit(NamedTable):
    """Default of credit card clients in Taiwan, 2005; amounts in New Taiwan dollars. A CSV export of UCI's workbook."""

    declared_size = 30_000
    file = "default_credit_card/UCI_Credit_Card.csv"
    source = (
        "the UCI Machine Learning Repository as an Excel workbook (https://archive.ics.uci.edu/dataset/350): save it "
        "as CSV, with the line of column names first"
    )
    schema = TableSchema(
        ignore=("ID",),
        aliases={"PAY_0": "PAY_1", "default payment next month": "default.payment.next.month"},
        columns=(
            Numeric("LIMIT_BAL", 0, 1_000_000),
            Numeric("AGE", 18, 100),
            Categorical("SEX", ("1", "2")),
            # some exports hold codes the documentation does not list
            Categorical("EDUCATION", ("1", "2", "3", "4"), other=True),
            Categorical("MARRIAGE", ("1", "2", "3"), other=True),
            *(Numeric(f"PAY_{month}", -2, 9) for month in range(1, 7)),
            *(Numeric(f"BILL_AMT{month}", 0, 1_000_000, log=True) for month in range(1, 7)),
            *(Numeric(f"PAY_AMT{month}", 0, 1_000_000, log=True) for month in range(1, 7)),
        ),
        label=ClassLabel("default.payment.next.month", (("0",), ("1",))),
    )


class Dropout(NamedTable):
    """Predicts students' dropout and academic success.

    Args:
        target: `three` classes (dropout, enrolled, graduate), or `dropout` against the rest.
    """

    declared_size = 4424
    file = "students_dropout/data.csv"
    columns: ClassVar[tuple[Numeric | Categorical, ...]] = (
        *(Numeric(name, low, high) for name, (low, high) in codes.DROPOUT_RANGES.items()),
        *(Categorical(name, values, other=True) for name, values in codes.DROPOUT_CATEGORIES.items()),
    )
    labels: ClassVar[dict[str, tuple[tuple[str, ...], ...]]] = {
        "three": (("Dropout",), ("Enrolled",), ("Graduate",)),
        "dropout": (("Enrolled", "Graduate"), ("Dropout",)),
    }

    def __init__(
        self,
        root: str | None = None,
        target: Literal["three", "dropout"] = "three",
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
        self.schema = TableSchema(delimiter=";", columns=self.columns, label=ClassLabel("Target", self.labels[target]))
        super().__init__(
            root, bins, crosses, download, test_fraction, salt, validation_fraction, split, eval_batch_size, on_device
        )


class GermanCredit(NamedTable):
    """Statlog German credit (german.doc): 0 good, 1 bad."""

    declared_size = 1000
    file = "german_credit/german.data"
    schema = TableSchema(
        names=(*codes.GERMAN_COLUMNS, "class"),
        delimiter=" ",
        columns=(
            Numeric("duration", 0, 72),
            Numeric("amount", 0, 20_000, log=True),
            Numeric("installment_rate", 1, 4),
            Numeric("residence_since", 1, 4),
            Numeric("age", 18, 80),
            Numeric("credits", 1, 4),
            Numeric("liable_people", 1, 2),
            *(Categorical(name, values) for name, values in codes.GERMAN_CATEGORIES.items()),
        ),
        label=ClassLabel("class", (("1",), ("2",))),
    )


class Nursery(NamedTable):
    """Ranking of nursery school applications (nursery.names), five classes."""

    declared_size = 12_960
    file = "nursery/nursery.data"
    schema = TableSchema(
        names=(*codes.NURSERY_CATEGORIES, "class"),
        columns=tuple(Categorical(name, values) for name, values in codes.NURSERY_CATEGORIES.items()),
        label=ClassLabel("class", (("not_recom",), ("recommend",), ("very_recom",), ("priority",), ("spec_prior",))),
    )


class WineQuality(NamedTable):
    """Red vinho verde (winequality.names): the tasters' score from 0 to 10.

    Args:
        target: the `score`, mapped onto [-1, 1], or `good`: 6 and above.
    """

    declared_size = 1599
    file = "wine_quality_red/winequality-red.csv"
    columns = tuple(Numeric(name, low, high) for name, (low, high) in codes.WINE_RANGES.items())
    labels: ClassVar[dict[str, ClassLabel | NumberLabel]] = {
        "score": NumberLabel("quality", 0, 10),
        "good": ClassLabel("quality", (tuple("012345"), ("6", "7", "8", "9", "10"))),
    }

    def __init__(
        self,
        root: str | None = None,
        target: Literal["score", "good"] = "score",
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
        self.schema = TableSchema(delimiter=";", scale="symmetric", columns=self.columns, label=self.labels[target])
        super().__init__(
            root, bins, crosses, download, test_fraction, salt, validation_fraction, split, eval_batch_size, on_device
        )


class CaliforniaHousing(NamedTable):
    """Median house value of California's census blocks, 1990; the census capped it at 500001 dollars."""

    declared_size = 20_640
    file = "california_housing/cal_housing.data"
    source = "StatLib (Pace and Barry, 1997)"
    schema = TableSchema(
        names=(*codes.CALIFORNIA_COLUMNS, "median_house_value"),
        scale="symmetric",
        columns=(
            Numeric("longitude", -125, -114),
            Numeric("latitude", 32, 42.5),
            Numeric("housing_median_age", 0, 52),
            Numeric("total_rooms", 0, 50_000, log=True),
            Numeric("total_bedrooms", 0, 10_000, log=True),
            Numeric("population", 0, 50_000, log=True),
            Numeric("households", 0, 10_000, log=True),
            Numeric("median_income", 0, 15),
        ),
        label=NumberLabel("median_house_value", 0, 500_001),
    )
