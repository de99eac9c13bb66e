"""Measures interval coverage of a regression: how often the target lies in the interval of a stated residual model.

A network predicts a number, not a distribution. The residual model adds one: y = prediction + residual, with residuals
that are Gaussian around 0 with a standard deviation s, or distributed as those of given rows. Its central interval at
level c is prediction +- h(c), with

* ``gaussian``: h(c) = s Phi^{-1}((1 + c) / 2);
* ``empirical``: h(c) = the ceil((n + 1) c)-th smallest of the n given |residuals|, infinite beyond the largest. For
  rows exchangeable with the given ones, a new row is covered with probability at least c (split conformal prediction).

Coverage must be measured on other rows than those that the model was estimated from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torchmetrics
from scipy.special import ndtri
from torch import Tensor

LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
UNIT = 1 << 24  # unit of squared residuals
LARGEST = 1 << 20
Kind = Literal["gaussian", "empirical"]


@dataclass(frozen=True)
class ResidualModel:
    """The distribution of residuals, and its origin.

    Args:
        kind: 'gaussian' or 'empirical'.
        scale: the standard deviation of the Gaussian.
        sizes: the sorted |residuals| of the empirical model.
        source: a description of what it was estimated from.
    """

    kind: Kind
    scale: float = math.nan
    sizes: tuple[float, ...] = ()
    source: str = "stated"

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "empirical"):
            raise ValueError(f"residual_model={self.kind!r} is unknown. HINT: use 'gaussian' or 'empirical'.")
        if self.kind == "gaussian" and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(
                f"residual_scale={self.scale} is not positive and finite. HINT: give the residuals' standard deviation."
            )
        if self.kind == "empirical" and not self.sizes:
            raise ValueError("an empirical residual model needs residuals. HINT: leave residual_scale out.")

    @classmethod
    def of_residuals(cls, residuals: Tensor, kind: Kind, source: str) -> ResidualModel:
        """Estimates the model from the residuals of some rows: their root mean square, or the residuals themselves."""
        sizes = residuals.detach().double().abs().flatten()
        if not len(sizes) or not bool(torch.isfinite(sizes).all()):
            raise ValueError(
                f"{len(sizes)} residuals, of which {int((~sizes.isfinite()).sum())} are not finite, make no residual "
                "model. HINT: give more rows to estimate it from, or state residual_scale."
            )
        if kind == "empirical":
            return cls(kind, sizes=tuple(sizes.sort().values.tolist()), source=source)
        scale = math.sqrt(math.fsum((sizes**2).tolist()) / len(sizes))
        return cls(kind, scale=max(scale, math.ulp(0.0) * 2**60), source=source)

    def half_width(self, level: float) -> float:
        """Returns h(level)."""
        if self.kind == "gaussian":
            return self.scale * float(ndtri((1 + level) / 2))
        rank = math.ceil((len(self.sizes) + 1) * level - 1e-9)
        return self.sizes[rank - 1] if rank <= len(self.sizes) else math.inf

    def describe(self) -> str:
        gaussian = self.kind == "gaussian"
        what = f"Gaussian, s = {self.scale:.4g}" if gaussian else f"the residuals of {len(self.sizes)} rows"
        return f"{what}, {self.source}"


def check_levels(levels: Iterable[float]) -> tuple[float, ...]:
    found = tuple(sorted(set(map(float, levels))))
    if not found or not all(0 < level < 1 for level in found):
        raise ValueError(f"levels {list(found)} are not in (0, 1). HINT: use [0.5, 0.9, 0.95].")
    return found


class CoverageSums(torchmetrics.Metric):
    """Counts the rows that the interval of each level covers, and sums their squared residuals, as integers."""

    full_state_update = False
    is_differentiable = False
    rows: Tensor
    undefined: Tensor
    squares: Tensor
    covered: Tensor

    def __init__(self, levels: Sequence[float] = LEVELS, **options: Any) -> None:
        super().__init__(**options)
        self.levels = check_levels(levels)
        self.model: ResidualModel | None = None
        for name, shape in (("rows", ()), ("undefined", ()), ("squares", ()), ("covered", (len(self.levels),))):
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        if self.model is None:
            raise ValueError(
                "no residual model was set. HINT: set metric.model = ResidualModel('gaussian', scale=0.1)."
            )
        sizes = (predictions.detach().double().flatten() - targets.detach().double().flatten()).abs()
        finite = sizes.isfinite()
        self.undefined = self.undefined + (~finite).sum()
        sizes = sizes[finite]
        widths = torch.tensor([self.model.half_width(level) for level in self.levels], dtype=torch.float64)
        self.rows = self.rows + len(sizes)
        self.squares = self.squares + (sizes.square().clamp(max=float(LARGEST)) * UNIT).round().long().sum()
        self.covered = self.covered + (sizes.unsqueeze(1) <= widths.to(sizes.device)).sum(0)

    def compute(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("rows", "undefined", "squares", "covered")}


@dataclass(frozen=True)
class CoverageScores:
    """Nominal against empirical coverage, and the width of the intervals.

    ``nll`` is that of the Gaussian model, None for the empirical one. Errors are NaN if a prediction was not finite.
    """

    rows: int
    undefined: int
    levels: tuple[float, ...]
    coverage: tuple[float, ...]
    half_widths: tuple[float | None, ...]
    mean_error: float
    maximum_error: float
    nll: float | None
    residual_model: str

    @classmethod
    def of_sums(cls, sums: Mapping[str, Tensor], levels: Sequence[float], model: ResidualModel) -> CoverageScores:
        finite, undefined = int(sums["rows"]), int(sums["undefined"])
        rows = finite + undefined
        if not rows:
            raise ValueError("there are no rows to measure coverage on. HINT: hold out rows with validation_fraction.")
        coverage = tuple(int(n) / rows for n in sums["covered"].tolist())
        gaps = [abs(share - level) for share, level in zip(coverage, levels, strict=True)]
        valid = math.nan if undefined else 1.0
        widths = tuple(w if math.isfinite(w := model.half_width(level)) else None for level in levels)
        nll = None
        if model.kind == "gaussian":
            mean_square = int(sums["squares"]) / UNIT / rows
            nll = (mean_square / model.scale**2 / 2 + math.log(model.scale) + math.log(2 * math.pi) / 2) * valid
        mean_error = math.fsum(gaps) / len(gaps) * valid
        return cls(
            rows, undefined, tuple(levels), coverage, widths, mean_error, max(gaps) * valid, nll, model.describe()
        )

    def scalars(self) -> dict[str, float]:
        """Returns the numbers that are logged."""
        found = {"coverage_error": self.mean_error, "largest_coverage_error": self.maximum_error}
        return found if self.nll is None else {"nll": self.nll, **found}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CoverageScores:
        lists = {name: tuple(values[name]) for name in ("levels", "coverage", "half_widths")}
        return cls(**{**values, **lists})
