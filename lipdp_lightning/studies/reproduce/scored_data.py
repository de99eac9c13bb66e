"""Scores the published tables of thesis 6.6.2 (b) by a logistic regression.

The model is fitted by scikit-learn to a fifth of the records, without privacy, and taken as public; releases are about
the other four fifths, which it has not seen. The thesis does not say which records its models were fitted to.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from scipy.sparse import csr_array

FITTED_SHARE = 0.2


@dataclass(frozen=True)
class Table:
    """The place of a table, its label, and the columns that name a person or are almost always missing."""

    file: str
    delimiter: str
    label: str
    positive: tuple[str, ...]
    left_out: tuple[str, ...] = ()


TABLES: Mapping[str, Table] = {
    "heart": Table("tabular/framingham/framingham.csv", ",", "TenYearCHD", ("1",)),
    "bank": Table("tabular/bank_marketing/bank-full.csv", ";", "y", ("yes",)),
    "diabetes": Table(
        "tabular/diabetes_130us/diabetic_data.csv", ",", "readmitted", ("<30", ">30"),
        ("encounter_id", "patient_nbr", "weight"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """Predicted probabilities of the positive class and labels of the evaluated records."""

    scores: npt.NDArray[np.float64]
    labels: npt.NDArray[np.bool_]
    instances: int
    features: int
    positive_share: float


@lru_cache(maxsize=2)
def scored(name: str, records: int | None = None) -> Scored:
    """Returns the table's scores, or those of its first `records` rows; every call returns the same."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    table = TABLES[name]
    columns = _columns(table, records)
    labels = np.isin(columns.pop(table.label), table.positive)
    order = np.random.default_rng(0).permutation(len(labels))
    fitted, evaluated = np.split(order, [round(FITTED_SHARE * len(labels))])
    matrix = _encoded({k: v for k, v in columns.items() if k not in table.left_out}, fitted)
    model = LogisticRegression(max_iter=300).fit(matrix[fitted], labels[fitted])
    scores = model.predict_proba(matrix[evaluated])[:, 1]
    return Scored(scores, labels[evaluated], len(labels), len(columns), float(labels.mean()))


def _columns(table: Table, records: int | None) -> dict[str, npt.NDArray[np.str_]]:
    import numpy as np

    from ...data_modules.found_files import data_root, find_file, read_text

    path = find_file(data_root(None), table.file, "docs/reproduce.md says where it is published")
    rows = list(csv.reader(io.StringIO(read_text(path)), delimiter=table.delimiter))
    body = np.array(rows[1:] if records is None else rows[1 : records + 1], dtype=np.str_)
    if body.ndim != 2 or table.label not in rows[0]:
        raise ValueError(f"{path} is not the table that was published. HINT: fetch it again.")
    return {name: body[:, i] for i, name in enumerate(rows[0])}


def _encoded(columns: Mapping[str, npt.NDArray[np.str_]], fitted: npt.NDArray[np.int64]) -> csr_array:
    """Standardises numbers, with the median for missing ones, and one-hot codes texts, all by the fitted
    records alone.
    """
    import numpy as np
    from scipy.sparse import csr_array, hstack
    from sklearn.preprocessing import OneHotEncoder

    numbers, texts = [], []
    for column in columns.values():
        values = np.where(np.isin(column, ("NA", "?", "")), "nan", column)
        try:
            parsed = values.astype(np.float64)
        except ValueError:
            texts.append(column)
            continue
        if not np.isnan(parsed[fitted]).all():
            numbers.append(parsed)
    parts = []
    if numbers:
        table = np.stack(numbers, axis=1)
        table = np.where(np.isnan(table), np.nanmedian(table[fitted], axis=0), table)
        deviation = table[fitted].std(axis=0)
        parts.append(csr_array((table - table[fitted].mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)))
    if texts:
        categories = np.stack([text.astype(object) for text in texts], axis=1)
        encoder = OneHotEncoder(handle_unknown="ignore", min_frequency=20).fit(categories[fitted])
        parts.append(csr_array(encoder.transform(categories)))
    return csr_array(hstack(parts))
