"""Defines `DeclaredRows` and `GivenRows`, the bases of modules whose shapes, task and bounds follow from a schema."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lipdp_lightning.data_modules.array_schema import ArraySchema
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.declaration import Declaration
from lipdp_lightning.data_modules.schema import ClassLabel, TableSchema


class DeclaredRows(PrivateDataModule):
    """Serves as the base of modules that follow a schema."""

    schema: Any
    heldout_share = 0.2

    def adopt(self, schema: TableSchema | ArraySchema) -> None:
        """Takes shapes, task and bounds from the schema."""
        self.schema, self.grouping = schema, schema.grouping
        self.input_shape, self.input_bound = schema.shape, schema.input_bound
        if isinstance(schema.label, ClassLabel):
            self.num_classes = len(schema.label.values)
            self.task = "binary" if self.num_classes == 2 else "classification"
            names = tuple(spellings[0] for spellings in schema.label.values)
            self.class_names = None if names == tuple(map(str, range(len(names)))) else names
        else:
            self.task, self.target_bound = "regression", 1.0

    def in_units(self, targets: Tensor) -> Tensor:
        """Returns numbers in [-1, 1] in the declared range of the label."""
        label = self.schema.label
        return targets if isinstance(label, ClassLabel) else label.low + (targets + 1) / 2 * (label.high - label.low)


class GivenRows(DeclaredRows):
    """Serves as the base of modules that are given their rows and a declaration.

    Args:
        source: the training rows.
        declaration: what is public about them.
        heldout: rows published as held out; without them a fifth of the rows is held out.
        test_fraction: the share of the rows to set aside for the test; settings are then chosen on the validation rows.
        validation_fraction: the share of the rows to hold out; 0 if rows were published as held out.
        options: those of every data module.
    """

    def __init__(
        self,
        source: Any,
        declaration: Declaration,
        heldout: Any = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        **options: Any,
    ) -> None:
        published = validation_fraction is None and heldout is not None
        super().__init__(0.0 if published else validation_fraction, **options)
        self.source, self.heldout, self.test_fraction = source, heldout, test_fraction
        schema, self.declared_size = self.declared_by(declaration)
        self.adopt(schema)

    def declared_by(self, declaration: Declaration) -> tuple[TableSchema | ArraySchema, int]:
        """Returns the schema that the rows need, and the declared number of rows."""
        raise NotImplementedError

    def part(self, name: str) -> Any:
        """Returns the source of the training or the test rows; None if there is none."""
        return self.heldout if name == "test" else self.source

    def where(self, part: str) -> str:
        return f"{type(self.part(part)).__name__}, {part} rows"
