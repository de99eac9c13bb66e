"""Reads tables in CSV (plain or gzipped) or Parquet files, by a declared schema."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lipdp_lightning.data_modules.base import GroupedRows, PrivateDataModule, Rows
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.encoding import RawTable, encode, group_names, match_columns
from lipdp_lightning.data_modules.found_files import kind_of, read_text, refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.schema import ClassLabel, TableSchema
from lipdp_lightning.data_modules.splits import Split
from lipdp_lightning.data_modules.table_cells import stripped
from lipdp_lightning.extras import imported


def read_csv(path: Path, schema: TableSchema) -> RawTable:
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
    # a file of another kind is recognised by its first line, so this comes before the lack of rows
    names = [] if header is None else match_columns(path, list(header), schema)
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


def read_parquet(path: Path, schema: TableSchema) -> RawTable:
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
    names = match_columns(path, list(table.column_names), schema)
    columns = dict(zip(names, map(stripped, (column.to_pylist() for column in table.columns)), strict=True))
    return RawTable(path, columns, range(1, table.num_rows + 1))


def read_table(path: Path, schema: TableSchema) -> RawTable:
    """Reads a file named `.parquet` as Parquet and any other as CSV."""
    return read_parquet(path, schema) if path.suffix == ".parquet" else read_csv(path, schema)


class SchemaTable(PrivateDataModule):
    """Serves as the base of every table: all its declarations follow from its schema."""

    schema: TableSchema
    heldout_share = 0.2

    def adopt(self, schema: TableSchema) -> None:
        """Takes shapes, task and bounds from the schema."""
        self.schema, self.grouping = schema, schema.grouping
        self.input_shape = (schema.width,)
        self.input_bound = schema.input_bound
        if isinstance(schema.label, ClassLabel):
            self.num_classes = len(schema.label.values)
            self.task = "binary" if self.num_classes == 2 else "classification"
        else:
            self.task, self.target_bound = "regression", 1.0

    def read(self, path: Path) -> Rows:
        return encode(read_table(path, self.schema), self.schema)

    def read_units(self, path: Path) -> Rows | GroupedRows:
        """Returns the training rows, with their groups if the schema declares them."""
        table = read_table(path, self.schema)
        rows = encode(table, self.schema)
        return rows if self.schema.grouping is None else (*rows, group_names(table, self.schema))

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


class CSVTable(SchemaTable):
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
        if validation_fraction is None and heldout_path is not None:
            validation_fraction = 0.0
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        self.test_fraction = test_fraction
        self.path, self.heldout_path = Path(path), None if heldout_path is None else Path(heldout_path)
        declared, self.declared_size = Declaration.of(schema).table_schema()
        self.adopt(declared)

    def where(self, part: str) -> str:
        return str(self.heldout_path if part == "test" else self.path)

    def load_train(self) -> Rows | GroupedRows:
        return self.read_units(self.path)

    def load_test(self) -> Rows | None:
        return None if self.heldout_path is None else self.read(self.heldout_path)
