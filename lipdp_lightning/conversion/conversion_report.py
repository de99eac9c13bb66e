"""The report of a conversion: what changed, how far the outputs moved, and what cannot be certified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..bounds.graph import Problem


@dataclass(frozen=True)
class Change:
    """One module of the model: ``what`` became of it, and ``why``."""

    path: str
    kind: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'} ({self.kind}): {self.what}, {self.why}"


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
        changes: One entry for each module that holds parameters or was replaced, in the model's order.
        moved: The norm of the change of the outputs over the norm of the outputs, on made-up inputs.
        refusals: The reasons why no certificate can be given; empty if there is one.
        blocks: The number of modules that are trained beside the head; None if the whole model was converted.
        trained: The names of the parameters that are trained, in the converted network.
        renamed: The original name of each tensor of the converted network that has another name.
        input_shape: The shape of one example.
        input_bound: The largest norm of one example.
    """

    changes: tuple[Change, ...]
    moved: float
    refusals: tuple[Problem, ...]
    blocks: int | None
    trained: tuple[str, ...]
    renamed: dict[str, str]
    input_shape: tuple[int, ...]
    input_bound: float

    @property
    def certified(self) -> bool:
        """Returns whether the converted network has a certificate with something to train."""
        return not self.refusals

    def __str__(self) -> str:
        lines = [str(change) for change in self.changes]
        lines.append(f"outputs moved by {100 * self.moved:.3g} % on made-up inputs of shape {self.input_shape}")
        if self.renamed:
            lines.append(f"{len(self.renamed)} tensors have new names; report.renamed gives the original ones")
        if self.certified:
            lines.append(f"certified: {len(self.trained)} parameters are trained")
        else:
            lines += ["cannot be certified:", *(f"  - {problem}" for problem in self.refusals)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "changes": [vars(change) for change in self.changes],
            "moved": self.moved,
            "refusals": [str(problem) for problem in self.refusals],
            "blocks": self.blocks,
            "trained": list(self.trained),
            "renamed": dict(self.renamed),
            "input_shape": list(self.input_shape),
            "input_bound": self.input_bound,
        }
