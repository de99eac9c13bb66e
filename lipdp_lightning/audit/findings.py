"""Defines the findings of an audit: one for each question, with its numbers and its plot as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "violation", "information"]


@dataclass(frozen=True)
class Curve:
    """A line, a cloud of points or the bars of a histogram."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "points", "bars"] = "line"


@dataclass(frozen=True)
class PlotData:
    """A plot as data, to be drawn in the style of the run's report."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    ``factor`` is measured over claimed, above 1 where the claim is broken. ``p_value`` is compared with ``alpha``, this
    question's share of the suite's probability of a false alarm. An ``epsilon_lower`` holds with probability 1 - alpha.
    """

    name: str
    question: str
    verdict: Verdict
    statement: str
    factor: float | None = None
    p_value: float | None = None
    alpha: float | None = None
    epsilon_lower: float | None = None
    epsilon_claimed: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    plots: tuple[PlotData, ...] = ()

    @property
    def violated(self) -> bool:
        return self.verdict == "violation"

    def as_dict(self) -> dict[str, Any]:
        """Returns strict JSON data; numbers that are not finite become text."""
        content: dict[str, Any] = strict(asdict(self))
        return content


def verdict(violated: bool) -> Verdict:
    return "violation" if violated else "pass"


def strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
