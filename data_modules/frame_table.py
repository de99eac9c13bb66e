"""Defines `FrameTable`: private rows in a DataFrame or another table in memory, with a declaration."""

from __future__ import annotations

from lipdp_lightning.data_modules.csv_table import GivenTable, table_in_memory
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.encoding import RawTable, match_columns
from lipdp_lightning.data_modules.frames import column_names
from lipdp_lightning.data_modules.schema import TableSchema


class FrameTable(GivenTable):
    """Private rows in a table that another library holds; `PrivateData.of` makes it."""

    def declared_by(self, declaration: Declaration) -> tuple[TableSchema, int]:
        schema, rows = super().declared_by(declaration)
        match_columns(self.where("training"), column_names(self.source), schema)
        return schema, rows

    def table(self, part: str) -> RawTable | None:
        frame = self.part(part)
        return None if frame is None else table_in_memory(frame, self.where(part), self.schema)
