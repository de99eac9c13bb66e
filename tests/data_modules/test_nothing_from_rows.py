"""Nothing that is declared derives from private rows: a row less, or another order, changes no other row.

The broken variants take ranges, categories, N or a type from the rows, and the same check fails for each.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lipdp_lightning.data_modules import Declaration, PrivateData, PrivateDataModule, table_cells
from lipdp_lightning.data_modules.suggestions import suggest

Row = dict[str, Any]
Make = Callable[[Sequence[Row]], PrivateDataModule]

DECLARED: dict[str, Any] = {
    "rows": 60,
    "missing": {"markers": ["-1"], "policy": "bucket"},
    "columns": [
        {"name": "age", "low": 0, "high": 120, "bins": 3},
        {"name": "born", "date": "%Y-%m-%d", "low": "1900-01-01", "high": "2020-01-01"},
        {"name": "job", "categories": ["1", "2", ["three", "3"]], "other": True},
    ],
    "label": {"name": "y", "values": ["0", "1"]},
}


def row(number: int, age: float | None, job: Any, y: int) -> Row:
    day = datetime.date(1950, 1, 1) + datetime.timedelta(days=37 * number)
    return {"age": age, "born": day, "job": job, "y": y, "patient": f"p{number // 2}"}


def as_frame(rows: Sequence[Row]) -> dict[str, Any]:
    """A table as pandas holds it: one missing value makes floats of a column of integers, and one text objects."""
    frame: dict[str, Any] = {}
    for name in ("age", "born", "job", "y", "patient"):
        values = [r[name] for r in rows]
        if all(v is None or isinstance(v, int | float) for v in values) and any(v is None for v in values):
            frame[name] = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        elif all(isinstance(v, int) for v in values):
            frame[name] = np.array(values)
        else:
            frame[name] = values
    return frame


def declared(rows: Sequence[Row]) -> PrivateDataModule:
    return PrivateData.of(as_frame(rows), DECLARED | {"ignore": ["patient"]})


def declared_groups(rows: Sequence[Row]) -> PrivateDataModule:
    return PrivateData.of(as_frame(rows), DECLARED | {"rows": 30}, group="patient", max_rows=1)


def declared_bytes(rows: Sequence[Row]) -> PrivateDataModule:
    """Rows of a dataset, of which some give bytes and others floats."""
    items = [
        (np.full((1, 2, 2), r["age"] or 0, dtype=np.uint8 if isinstance(r["job"], int) else np.float64), r["y"])
        for r in rows
    ]
    schema = {"rows": 60, "shape": [1, 2, 2], "low": 0, "high": 255, "label": {"classes": 2}}
    return PrivateData.of(items, schema)


def from_rows(rows: Sequence[Row], *keys: str) -> PrivateDataModule:
    """A broken module: some entries of each column are those of the private rows."""
    frame = as_frame([{k: v for k, v in r.items() if k != "patient"} | {"patient": ""} for r in rows])
    found = {entry["name"]: entry for entry in suggest({n: frame[n] for n in ("age", "job")}, None, None)[0]}
    columns = []
    for entry in DECLARED["columns"]:
        taken = {key: found[entry["name"]][key] for key in keys if key in entry and key in found.get(entry["name"], {})}
        columns.append({**entry, **taken})
    return PrivateData.of(as_frame(rows), DECLARED | {"columns": columns, "ignore": ["patient"]})


def ranges_from_rows(rows: Sequence[Row]) -> PrivateDataModule:
    return from_rows(rows, "low", "high")


def categories_from_rows(rows: Sequence[Row]) -> PrivateDataModule:
    jobs = sorted({str(r["job"]) for r in rows})
    columns = [*DECLARED["columns"][:2], {"name": "job", "categories": jobs}]
    return PrivateData.of(as_frame(rows), DECLARED | {"columns": columns, "ignore": ["patient"]})


def size_from_rows(rows: Sequence[Row]) -> PrivateDataModule:
    return PrivateData.of(as_frame(rows), DECLARED | {"rows": len(rows), "ignore": ["patient"]})


def facts(module: PrivateDataModule) -> list[Any]:
    return [
        module.describe(), module.input_shape, module.input_bound, module.dataset_size, module.num_classes, module.task,
        module.scale, module.offset, module.unit, module.max_examples_per_unit,
    ]  # fmt: skip


def sides(module: PrivateDataModule) -> tuple[list[Any], list[Any]]:
    """The training rows and the held-out rows, as bits, in any order."""
    module.setup()
    assert module._train is not None and module._validation is not None
    kept, out = ([rows[i : i + 1] for i in range(len(rows))] for rows in (module._train, module._validation))
    return tuple(sorted((x.numpy().tobytes(), float(y)) for x, y, _ in part) for part in (kept, out))  # type: ignore[return-value]


def moved(make: Make, rows: list[Row], gone: int, order: Sequence[int]) -> str | None:
    """Returns what one row's absence or another order changes about the declarations and the other rows, or None."""
    whole, fewer, mixed = make(rows), make(rows[:gone] + rows[gone + 1 :]), make([rows[i] for i in order])
    if not facts(whole) == facts(fewer) == facts(mixed):
        return "declarations"
    x, y = whole.load_train()[:2]
    left = torch.tensor([i for i in range(len(rows)) if i != gone])
    for other, which in ((fewer, left), (mixed, torch.tensor(order))):
        x2, y2 = other.load_train()[:2]
        if x.dtype != x2.dtype or not (torch.equal(x[which], x2) and torch.equal(y[which], y2)):
            return "encoding"
    if sides(whole) != sides(mixed):
        return "sides"
    for all_of, without in zip(sides(whole), sides(fewer), strict=True):
        # one entry of one side is gone; in a group, another row of it may take its place
        if len([entry for entry in without if entry not in all_of]) > (make is declared_groups):
            return "sides"
    return None


ROWS = [row(i, float(20 + i % 50), 1 + i % 2, i % 2) for i in range(60)]
ODD = {
    "missing job": row(60, 30.0, None, 1),
    "text as job": row(60, 30.0, "three", 1),
    "old": row(60, 119.0, 1, 1),
    "rare job": row(60, 30.0, 3, 0),
    "another job": row(60, 30.0, "astronaut", 0),
    "marked as missing": row(60, -1.0, -1, 0),
    "large number": row(60, 1e18, 2, 1),
    "missing age": row(60, None, 2, 1),
    "usual": row(60, 44.0, 2, 1),
}
ORDER = list(np.random.default_rng(0).permutation(61))


@pytest.mark.parametrize("make", [declared, declared_groups])
@pytest.mark.parametrize("odd", ODD)
def test_no_row_changes_a_declaration_or_another_row(make: Make, odd: str) -> None:
    assert moved(make, [*ROWS, ODD[odd]], 60, ORDER) is None


@pytest.mark.parametrize("odd", ODD)
def test_no_row_changes_a_declaration_or_another_row_of_a_dataframe(odd: str) -> None:
    """Run where pandas is installed; what it does to the types of a column is its own."""
    pandas = pytest.importorskip("pandas")

    def make(rows: Sequence[Row]) -> PrivateDataModule:
        frame = pandas.DataFrame({name: [r[name] for r in rows] for name in rows[0]})
        return PrivateData.of(frame, DECLARED | {"ignore": ["patient"]})

    assert moved(make, [*ROWS, ODD[odd]], 60, ORDER) is None


def test_no_row_changes_how_others_are_stored() -> None:
    """Bytes and floats are stored alike, since the bits of a row choose its side."""
    for odd in ("text as job", "usual"):
        assert moved(declared_bytes, [*ROWS, ODD[odd]], 60, ORDER) is None


@pytest.mark.parametrize(
    ("make", "odd", "what"),
    [
        (ranges_from_rows, "old", "declarations"),
        (categories_from_rows, "another job", "declarations"),
        (categories_from_rows, "rare job", "declarations"),
        (size_from_rows, "usual", "declarations"),
    ],
)
def test_broken_variants_that_read_the_rows_fail_the_same_check(make: Make, odd: str, what: str) -> None:
    assert moved(make, [*ROWS, ODD[odd]], 60, ORDER) == what


def test_a_text_of_its_own_for_each_type_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As str does: 1.0 and 1 are two categories, so a missing value in one row moves all others."""
    monkeypatch.setattr(table_cells, "text_of", str)
    assert moved(declared, [*ROWS, ODD["missing job"]], 60, ORDER) == "encoding"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            row,
            st.integers(0, 400),
            st.one_of(st.none(), st.floats(-1e20, 1e20), st.integers(-1, 130)),
            st.sampled_from([None, 1, 2, 3, "three", "1", "x", True, -1, 2.5]),
            st.integers(0, 1),
        ),
        min_size=58,
        max_size=62,
    ),
    st.randoms(use_true_random=False),
)
def test_any_rows_in_any_order(rows: list[Row], random: Any) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    gone = random.randrange(len(rows))
    try:
        found = moved(declared, rows, gone, order)
    except ValueError:  # too far from the declared size, or all rows on one side: a refusal moves nothing
        event("refused")
    else:
        assert found is None


def test_a_suggestion_from_the_rows_is_what_the_check_is_about() -> None:
    """The guard against it is the object's identity alone; a copy passes, and the declarations then move."""

    def make(rows: Sequence[Row]) -> PrivateDataModule:
        suggested = Declaration.from_public(as_frame(rows), label="y").declare(rows=60)
        return PrivateData.of(as_frame(rows), suggested)

    assert moved(make, [*ROWS, ODD["old"]], 60, ORDER) == "declarations"
