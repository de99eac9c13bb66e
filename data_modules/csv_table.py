"""Reads tables in CSV (plain or gzipped) or Parquet files, by a declared schema."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lipdp_lightning.data_modules.base import GroupedRows, Rows
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.declared_rows import DeclaredRows, GivenRows
from lipdp_lightning.data_modules.encoding import RawTable, encode, encode_features, group_names, match_columns
from lipdp_lightning.data_modules.found_files import kind_of, read_text, refusal
from lipdp_lightning.data_modules.frames import column_names, read_columns
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import ClassLabel, TableSchema
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.table_cells import stripped
from lipdp_lightning.extras import imported


def read_csv(path: Path, schema: TableSchema, labelled: bool = True) -> RawTable:
    """Returns the file's columns as text. Blank and comment lines hold no record; a ragged row is an error."""
    lines: Iterator[str] = io.StringIO(read_text(path, schema.encoding), newline="")
    if schema.comment is not None:
        marker = schema.comment
        # an empty line keeps the reader's line count equal to the file's
        lines = ("\n" if line.startswith(marker) else line for line in lines)
    reader = csv.reader(lines, delimiter=schema.delimiter, skipinitialspace=True, strict=True)
    numbered: list[tuple[int, list[str]]] = []
    start = 1
    try:
        for row in reader:
            if row:
                # a quoted field may hold line ends, so a record is named by the line where it begins
                numbered.append((start, row))
            start = reader.line_num + 1
    except csv.Error as error:
        # an open quote runs to the end of the file, so the error names the line where its row starts
        raise refusal(f"{path}, row {start}: {error}", "check the quotes of that row") from None
    header: Sequence[str] | None = schema.names
    first = [name.strip() for name in numbered[0][1]] if numbered else []
    if numbered and (header is None or first == list(header)):  # some copies of a file have a header, others do not
        header, numbered = first, numbered[1:]
    elif header is not None and not labelled and len(first) == len(header) - 1:
        header = [name for name in header if name != schema.label.name]
    # a file of another kind is recognised by its first line, so this comes before the lack of rows
    names = [] if header is None else match_columns(path, list(header), schema, labelled)
    if not numbered:
        raise refusal(f"{path} has no rows", "the download or export was cut off: fetch it again")
    ragged = [(line, len(row)) for line, row in numbered if len(row) != len(names)]
    if ragged:
        line, found = ragged[0]
        raise refusal(
            f"{path}, row {line}: {found} fields where {len(names)} are declared ({len(ragged)} such rows)",
            "check the delimiter, and quote fields that contain it",
        )
    values = zip(*(row for _, row in numbered), strict=True)
    columns: dict[str, Sequence[Any]] = {
        name: [value.strip() for value in column] for name, column in zip(names, values, strict=True)
    }
    return RawTable(path, columns, [line for line, _ in numbered])


def read_parquet(path: Path, schema: TableSchema, labelled: bool = True) -> RawTable:
    """Returns the columns of a Parquet file, if pyarrow is installed; rows are numbered from 1."""
    if not path.is_file():
        raise refusal(f"there is no file {path}", "check the path")
    with path.open("rb") as file:
        head = file.read(64)
        file.seek(max(0, path.stat().st_size - 4))
        tail = file.read()
    if not head.startswith(b"PAR1"):
        found = kind_of(head) or ("not a Parquet file" if head else "empty")
        raise refusal(f"{path} is {found}", "check what wrote it")
    if tail != b"PAR1":
        raise refusal(f"{path} is a damaged Parquet file: its end is missing", "write or fetch it again")
    parquet = imported("pyarrow.parquet", str(path))
    try:
        table = parquet.read_table(path)
    except (ValueError, OSError, NotImplementedError):  # pyarrow's own errors derive from these
        raise refusal(f"{path} is a damaged Parquet file", "write it again") from None
    names = match_columns(path, list(table.column_names), schema, labelled)
    columns = dict(zip(names, map(stripped, (column.to_pylist() for column in table.columns)), strict=True))
    return RawTable(path, columns, range(1, table.num_rows + 1))


def read_table(path: Path, schema: TableSchema, labelled: bool = True) -> RawTable:
    """Reads a file named `.parquet` as Parquet and any other as CSV.

    Args:
        path: the file.
        schema: the declaration.
        labelled: whether the file must hold the label and the group; otherwise it may.
    """
    return (read_parquet if path.suffix == ".parquet" else read_csv)(path, schema, labelled)


def table_in_memory(frame: Any, name: str, schema: TableSchema, labelled: bool = True) -> RawTable:
    """Returns the cells of a DataFrame; errors name a row by its position and show no cell."""
    names = match_columns(name, column_names(frame), schema, labelled)
    columns = dict(zip(names, read_columns(frame), strict=True))
    return RawTable(name, columns, range(len(next(iter(columns.values())))), shows_values=False)


class SchemaTable(DeclaredRows):
    """Serves as the base of every table: all its declarations follow from its schema."""

    schema: TableSchema

    def table(self, part: str) -> RawTable | None:
        """Returns the cells of the training or the test rows; None if there are none."""
        raise NotImplementedError

    def load_train(self) -> Rows | GroupedRows:
        table = self.table("training")
        assert table is not None
        rows = encode(table, self.schema)
        return rows if self.schema.grouping is None else (*rows, group_names(table, self.schema))

    def load_test(self) -> Rows | None:
        table = self.table("test")
        return None if table is None else encode(table, self.schema)

    def features_of(self, table: Any) -> tuple[Tensor, list[int]]:
        """Returns the encoded rows of a table without labels, and their places in it.

        Args:
            table: the path of a CSV or Parquet file, or a DataFrame, with the declared columns. A label is not read.
        """
        if isinstance(table, str | Path):
            return encode_features(read_table(Path(table), self.schema, labelled=False), self.schema)
        name = f"{type(table).__name__}, rows to predict"
        return encode_features(table_in_memory(table, name, self.schema, labelled=False), self.schema)

    def declarations(self) -> list[str]:
        label = self.schema.label
        if isinstance(label, ClassLabel):
            target = f"label {label.name}: " + ", ".join("/".join(value) for value in label.values)
        else:
            target = f"target {label.name} in [{label.low:g}, {label.high:g}], mapped onto [-1, 1]"
        lines = [f"columns: {'; '.join(column.describe() for column in self.schema.columns)}", target]
        if self.schema.crosses:
            lines.append("joint categories of: " + ", ".join(" and ".join(pair) for pair in self.schema.crosses))
        return lines


class GivenTable(GivenRows, SchemaTable):
    """Serves as the base of tables that are given with a declaration."""

    def declared_by(self, declaration: Declaration) -> tuple[TableSchema, int]:
        return declaration.table_schema()


class CSVTable(GivenTable):
    """Any CSV or Parquet file with a schema in YAML (`data_modules.schema_yaml`).

    Args:
        path: the table of training rows.
        schema: a YAML file that declares its columns, label and number of rows, or the same keys in place.
        heldout_path: a second table, of rows published as held out; without it a fifth of the rows is held out.
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
        heldout = None if heldout_path is None else Path(heldout_path)
        super().__init__(Path(path), Declaration.of(schema), heldout, test_fraction, validation_fraction, **options)

    def where(self, part: str) -> str:
        return str(self.part(part))

    def table(self, part: str) -> RawTable | None:
        path = self.part(part)
        return None if path is None else read_table(path, self.schema)
