"""Compares an accuracy with that of always predicting the most frequent class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lipdp_lightning.report.formats import finite

__all__ = ["Majority"]

STANDARD_ERRORS = 2.0  # an accuracy that is further above than this is better
BESIDE = ("majority_rate", "balanced_accuracy", "auroc")


@dataclass(frozen=True)
class Majority:
    """An accuracy, and what is known of the same held-out rows without the model.

    ``rate`` is the share of the most frequent class. ``standard_error`` is that of the difference of the two, both
    measured on the same rows. Balanced accuracy is the mean over the classes of the share that was recognised, and
    AUROC the mean over the classes, each against the rest; both are None where they were not recorded.
    """

    accuracy: float
    rate: float
    standard_error: float
    balanced_accuracy: float | None
    auroc: float | None

    @classmethod
    def of(cls, metrics: Mapping[str, Any], name: str | None) -> Majority | None:
        """Returns the comparison for the accuracy of that name, or None where its numbers are not among the metrics."""
        if name is None or "accuracy" not in name:
            return None
        head, _, tail = name.rpartition("accuracy")
        parts = ("accuracy", "majority_rate", "standard_error", "balanced_accuracy", "auroc")
        accuracy, rate, error, balanced, auroc = (finite(metrics.get(f"{head}{part}{tail}")) for part in parts)
        if accuracy is None or rate is None or error is None:
            return None
        return cls(accuracy, rate, error, balanced, auroc)

    @property
    def is_beaten(self) -> bool:
        """Says whether the accuracy is above the rate by more than two standard errors."""
        return self.accuracy - self.rate > STANDARD_ERRORS * self.standard_error

    def beside(self) -> str:
        """Returns the numbers that belong beside the accuracy."""
        parts = [f"the most frequent class alone: {_percent(self.rate)}"]
        if self.balanced_accuracy is not None:
            parts.append(f"balanced accuracy {_percent(self.balanced_accuracy)}")
        if self.auroc is not None:
            parts.append(f"AUROC {self.auroc:.3f}")
        return ", ".join(parts)

    def caution(self) -> str | None:
        """Returns what a reader must know where the accuracy shows no use of the model."""
        if self.is_beaten:
            return None
        return (
            f"The accuracy of {_percent(self.accuracy)} is no better than always predicting the most frequent class, "
            f"{_percent(self.rate)} (standard error of the difference {_percent(self.standard_error)}). Nothing shows "
            "that the model is of use: more steps, a larger learning rate or less noise may be needed."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.3g}\u00a0%"
