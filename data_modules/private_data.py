"""Defines `PrivateData`, which makes a data module of whatever holds the private rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.csv_table import CSVTable
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.declared_arrays import DeclaredArrays, TarShards
from lipdp_lightning.data_modules.encoding import header_problems
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.frame_table import FrameTable
from lipdp_lightning.data_modules.frames import column_names, is_table, library_of
from lipdp_lightning.data_modules.headers import table_header
from lipdp_lightning.data_modules.placeholders import FILL_IN
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split

TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".parquet")
SHARDS = (".tar", ".tar.gz", ".tgz")
_COLUMN_HINT = "declare the column, or list it under ignore"
Declared = Declaration | str | Path | Mapping[str, Any]


class PrivateData:
    """Makes data modules; `PrivateData.of(frame, declare="people.schema.yaml")` is all that a project needs."""

    @staticmethod
    def of(
        x: Any,
        declare: Declared | None = None,
        *,
        group: str | None = None,
        max_rows: int | None = None,
        sampling: str = "groups",
        heldout: Any = None,
        validation_fraction: float | None = None,
        test_fraction: float = 0.0,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> PrivateDataModule:
        """Returns a data module with private rows and public declarations.

        Args:
            x: a DataFrame of pandas or polars, a pyarrow table, a mapping of columns or a list of records; a CSV or
                Parquet file; arrays `(x, y)`; a torch, torchvision or Hugging Face dataset; or tar shards.
            declare: what is public about the rows: a `Declaration`, a YAML file, or the content of one. None makes an
                error that lists what has to be declared, with a declaration to start from.
            group: the column that names the patient, the household or the customer whose rows are protected together.
            max_rows: the number of rows of one group that may count.
            sampling: `groups` draws groups, and the declared number of rows is that of groups; `rows` draws rows.
            heldout: rows published as held out, in the form of `x`; without them a fifth of the rows is held out.
            validation_fraction: the share of the rows to hold out.
            test_fraction: the share of the rows to set aside for the test.
            split: decides which rows are held out, row by row, in place of a hash.
            eval_batch_size: rows per batch in validation, test and prediction.
            on_device: whether training rows are kept in a GPU's memory; 'auto' keeps them where their size fits.

        Raises:
            ValueError: lists at once everything that is left to declare, and never shows a private value.
        """
        kind = _kind(x)
        declaration = _declaration(x, kind, declare)
        if group is not None:
            grouping = {"column": group, "max_rows": FILL_IN if max_rows is None else max_rows, "sampling": sampling}
            declaration = declaration.declare(group=grouping)
        elif max_rows is not None:
            raise refusal(
                "max_rows is given without a group", "give group='patient', the column that names whose row it is"
            )
        _refuse_incomplete(x, kind, declaration)
        options: dict[str, Any] = {
            "test_fraction": test_fraction, "validation_fraction": validation_fraction, "split": split,
            "eval_batch_size": eval_batch_size, "on_device": on_device,
        }  # fmt: skip
        if kind == "table file":
            return CSVTable(str(x), declaration, None if heldout is None else str(heldout), **options)
        if kind == "shards":
            return TarShards(str(x), declaration, None if heldout is None else str(heldout), **options)
        if kind == "table" and not declaration.is_of_arrays:
            return FrameTable(x, declaration, heldout, **options)
        # a list of records and a dataset have columns as well as items
        if kind == "table" and not (isinstance(x, list) or library_of(x) == "datasets"):
            raise refusal(f"{_name(x)} has columns, and a shape is declared", "declare rows, columns and label")
        return DeclaredArrays(x, declaration, heldout, **options)


def _kind(x: Any) -> str:
    """Returns what is given, from its type or its name alone: no row is read."""
    if isinstance(x, str | Path):
        name = str(x).lower()
        found = "table file" if name.endswith(TABLES) else "shards" if name.endswith(SHARDS) else None
        if found is None:
            raise refusal(
                f"{x} has no ending of a known file: {', '.join((*TABLES, *SHARDS))}",
                "data_modules.NpzArrays reads .npz, and data_modules.ImageFolder folders of images",
            )
        return found
    if isinstance(x, tuple):
        return "arrays"
    if is_table(x):
        return "table"
    if isinstance(x, Mapping):
        raise refusal(f"{_name(x)} holds several tables, or no columns", "give one of them, such as dataset['train']")
    if isinstance(x, np.ndarray | Tensor):
        raise refusal("an array of features comes without labels", "use PrivateData.of((x, y), ...)")
    if hasattr(x, "__getitem__") or hasattr(x, "__iter__"):
        return "dataset"
    raise refusal(
        f"{type(x).__name__} holds no rows that are known here",
        "give a DataFrame, arrays (x, y), a dataset or a file; or derive from data_modules.PrivateDataModule",
    )


def _declaration(x: Any, kind: str, declare: Declared | None) -> Declaration:
    if declare is None:
        started = _started(x, kind)
        lines = "\n".join(started.missing())
        raise ValueError(
            f"{_name(x)}: nothing is declared yet, and nothing may be read from private rows\n{lines}\n"
            "HINT: save this text, fill it in and name the file: declare='schema.yaml'. A public sample fills in "
            f"suggestions: Declaration.from_public(sample).save('schema.yaml')\n\n{started.text()}"
        )
    declaration = Declaration.of(declare)
    if declaration.suggested_by is x:
        raise refusal(
            "the declaration was suggested by the private rows themselves, and its ranges and categories tell of them",
            "Declaration.from_public takes a sample that is public, or a schema",
        )
    return declaration


def _started(x: Any, kind: str) -> Declaration:
    if kind == "table":
        return Declaration.of_columns(column_names(x))
    if kind == "table file":
        return Declaration.of_columns(table_header(Path(x)).names)
    if kind == "arrays" and hasattr(x[0], "shape"):
        return Declaration.of_arrays(x[0].shape[1:] or (1,))  # the shape of a row, like a column's name, is no value
    return Declaration.of_arrays()


def _refuse_incomplete(x: Any, kind: str, declaration: Declaration) -> None:
    """Raises one ValueError with every entry to fill in and every column without a declaration."""
    problems = declaration.missing()
    if problems and kind == "table" and isinstance(declaration.content.get("columns"), list):
        problems += [f"{_name(x)}: {problem}\nHINT: {_COLUMN_HINT}" for problem in _of_header(x, declaration)]
    if problems:
        raise ValueError("\n".join(problems))


def _of_header(x: Any, declaration: Declaration) -> list[str]:
    content = declaration.content
    entries = [*content["columns"], content.get("label"), content.get("group")]
    declared = [entry.get("name", entry.get("column")) for entry in entries if isinstance(entry, dict)]
    named = dict.fromkeys(name for name in declared if isinstance(name, str) and name != FILL_IN)
    aliases, ignored = content.get("aliases"), content.get("ignore")
    names = [aliases.get(name, name) if isinstance(aliases, dict) else name for name in column_names(x)]
    left_out = [name for name in ignored if isinstance(name, str)] if isinstance(ignored, list) else []
    return header_problems(names, list(named), left_out)


def _name(x: Any) -> str:
    return str(x) if isinstance(x, str | Path) else type(x).__name__
