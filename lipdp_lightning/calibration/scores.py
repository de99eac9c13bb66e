"""Computes NLL, ECE, MCE, Brier score and diagrams from binned sums.

For a bin b let n_b be its number of rows, c_b their mean predicted probability and o_b the share for which the event
happened:

* ECE = sum_b n_b / n |o_b - c_b|, MCE = max_b |o_b - c_b| over bins with rows (Naeini et al. 2015; 003, section 6);
* NLL = mean of -log p_y;
* Brier score = mean of sum_k (p_k - [y = k])^2, and of (p_1 - y)^2 for two classes.

Overall, c is the confidence, the largest probability, and the event is that its class is right. For a class k against
the rest, c is p_k and the event is y = k; NLL and Brier score are those of that binary prediction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lipdp_lightning.calibration.sums import LOSS_UNIT, UNIT


@dataclass(frozen=True)
class Diagram:
    """Bins of equal width: the number of rows, their mean predicted probability, and the share of observed events.

    Means of an empty bin are None.
    """

    rows: tuple[int, ...]
    predicted: tuple[float | None, ...]
    observed: tuple[float | None, ...]

    @classmethod
    def of_sums(cls, rows: Tensor, predicted: Tensor, observed: Tensor) -> Diagram:
        counts = [int(n) for n in rows.tolist()]
        means = [s / UNIT / n if n else None for s, n in zip(predicted.tolist(), counts, strict=True)]
        shares = [s / n if n else None for s, n in zip(observed.tolist(), counts, strict=True)]
        return cls(tuple(counts), tuple(means), tuple(shares))

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[Any]]) -> Diagram:
        return cls(tuple(values["rows"]), tuple(values["predicted"]), tuple(values["observed"]))

    @property
    def gaps(self) -> list[tuple[int, float]]:
        """The rows and |observed - predicted| of the bins that hold any."""
        return [
            (n, abs(share - mean))
            for n, mean, share in zip(self.rows, self.predicted, self.observed, strict=True)
            if mean is not None and share is not None
        ]

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def mean_predicted(self) -> float:
        return self._mean(self.predicted)

    @property
    def mean_observed(self) -> float:
        return self._mean(self.observed)

    def _mean(self, values: tuple[float | None, ...]) -> float:
        parts = [n * value for n, value in zip(self.rows, values, strict=True) if value is not None]
        return math.fsum(parts) / self.total if self.total else math.nan

    def expected_error(self) -> float:
        return math.fsum(n * gap for n, gap in self.gaps) / self.total if self.total else math.nan

    def maximum_error(self) -> float:
        return max((gap for _, gap in self.gaps), default=math.nan)


@dataclass(frozen=True)
class ClassScores:
    """One class against the rest; ``rows`` are those of the class."""

    rows: int
    nll: float
    ece: float
    mce: float
    brier: float
    diagram: Diagram


@dataclass(frozen=True)
class ClassificationScores:
    """Scores of all rows, overall and per class; ``classwise_ece`` is the mean of the classes' ECE.

    If a row had no finite output, all scores are NaN, and ``undefined`` counts such rows.
    """

    rows: int
    undefined: int
    nll: float
    ece: float
    mce: float
    brier: float
    classwise_ece: float
    confidence: float
    accuracy: float
    diagram: Diagram
    per_class: tuple[ClassScores, ...]

    def scalars(self) -> dict[str, float]:
        """Returns the numbers that are logged."""
        names = ("nll", "ece", "mce", "brier", "classwise_ece", "confidence")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClassificationScores:
        """Inverts `to_dict`, also after JSON, in which an undefined score is null."""
        per_class = [ClassScores(**{**c, "diagram": Diagram.from_dict(c["diagram"])}) for c in values["per_class"]]
        diagram = Diagram.from_dict(values["diagram"])
        return cls(**{**values, "diagram": diagram, "per_class": tuple(per_class)})


def scores_of_sums(sums: Mapping[str, Tensor]) -> ClassificationScores:
    """Returns all scores; raises ValueError if there are no rows."""
    whole = {name: value.detach().cpu() for name, value in sums.items()}
    undefined = int(whole["undefined"])
    rows = int(whole["rows"]) + undefined
    if not rows:
        raise ValueError("there are no rows to be calibrated on. HINT: hold out rows with validation_fraction.")
    valid = math.nan if undefined else 1.0
    top = Diagram.of_sums(whole["top_rows"], whole["top_predicted"], whole["top_observed"])
    classes = len(whole["class_nll"])
    per_class = [_class_scores(whole, k, valid) for k in range(classes)]
    brier = math.fsum(c.brier for c in per_class) * (0.5 if classes == 2 else 1.0)
    return ClassificationScores(
        rows=rows,
        undefined=undefined,
        nll=_mean_loss(whole["nll"], whole["impossible"], rows) * valid,
        ece=top.expected_error() * valid,
        mce=top.maximum_error() * valid,
        brier=brier * valid,
        classwise_ece=math.fsum(c.ece for c in per_class) / classes,
        confidence=top.mean_predicted * valid,
        accuracy=top.mean_observed * valid,
        diagram=top,
        per_class=tuple(per_class),
    )


def _class_scores(whole: Mapping[str, Tensor], k: int, valid: float) -> ClassScores:
    diagram = Diagram.of_sums(whole["class_rows"][k], whole["class_predicted"][k], whole["class_observed"][k])
    total = max(diagram.total, 1)
    return ClassScores(
        rows=int(whole["class_observed"][k].sum()),
        nll=_mean_loss(whole["class_nll"][k], whole["class_impossible"][k], total) * valid,
        ece=diagram.expected_error() * valid,
        mce=diagram.maximum_error() * valid,
        brier=int(whole["class_brier"][k]) / UNIT / total * valid,
        diagram=diagram,
    )


def _mean_loss(total: Tensor, impossible: Tensor, rows: int) -> float:
    return math.inf if int(impossible) else int(total) / LOSS_UNIT / rows
