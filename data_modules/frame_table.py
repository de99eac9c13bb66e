"""Defines `FrameTable`: private rows in a DataFrame or another table in memory, with a declaration."""

from __future__ import annotations

from typing import Any

from lipdp_lightning.data_modules.base import GroupedRows, Rows
from lipdp_lightning.data_modules.csv_table import SchemaTable
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.encoding import RawTable, encode, group_names, match_columns
from lipdp_lightning.data_modules.frames import column_names, read_columns
from lipdp_lightning.data_modules.schema import TableSchema


def table_in_memory(frame: Any, name: str, schema: TableSchema) -> RawTable:
    """Returns the cells of a DataFrame; errors name a row by its position and show no cell."""
    names = match_columns(name, column_names(frame), schema)
    columns = dict(zip(names, read_columns(frame), strict=True))
    return RawTable(name, columns, range(len(next(iter(columns.values())))), shows_values=False)


class FrameTable(SchemaTable):
    """Private rows in a table that another library holds; `PrivateData.of` makes it.

    Args:
        frame: the training rows.
        declaration: what is public about them.
        heldout: a second table, of rows published as held out; without it a fifth of the rows is held out.
        test_fraction: the share of the rows to set aside for the test; settings are then chosen on the validation rows.
        validation_fraction: the share of the rows to hold out; 0 if rows were published as held out.
        options: those of every data module.
    """

    def __init__(
        self,
        frame: Any,
        declaration: Declaration,
        heldout: Any = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        **options: Any,
    ) -> None:
        published = validation_fraction is None and heldout is not None
        super().__init__(0.0 if published else validation_fraction, **options)
        self.frame, self.heldout, self.test_fraction = frame, heldout, test_fraction
        schema, self.declared_size = declaration.table_schema()
        match_columns(self.where("training"), column_names(frame), schema)
        self.adopt(schema)

    def where(self, part: str) -> str:
        return f"{type(self.frame).__name__}, {part} rows"

    def load_train(self) -> Rows | GroupedRows:
        table = table_in_memory(self.frame, self.where("training"), self.schema)
        rows = encode(table, self.schema)
        return rows if self.schema.grouping is None else (*rows, group_names(table, self.schema))

    def load_test(self) -> Rows | None:
        if self.heldout is None:
            return None
        return encode(table_in_memory(self.heldout, self.where("test"), self.schema), self.schema)
