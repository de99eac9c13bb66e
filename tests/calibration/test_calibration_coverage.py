"""Coverage of central intervals against numpy, and residual models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from lipdp_lightning.calibration import CoverageScores, CoverageSums, ResidualModel
from lipdp_lightning.calibration.coverage import LEVELS


def measured(model: ResidualModel, residuals: torch.Tensor) -> CoverageScores:
    metric = CoverageSums()
    metric.model = model
    for part in residuals.split(37):
        metric.update(torch.zeros_like(part), part)
    return CoverageScores.of_sums(metric.compute(), metric.levels, model)


@pytest.fixture
def residuals() -> torch.Tensor:
    return 1.4 * torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_gaussian_intervals_cover_what_a_loop_counts(residuals: torch.Tensor) -> None:
    found, r = measured(ResidualModel("gaussian", 1.0), residuals), residuals.numpy()
    for level, share, width in zip(LEVELS, found.coverage, found.half_widths, strict=True):
        low, high = stats.norm.interval(level)
        assert width == pytest.approx(high)
        assert share == np.mean((r >= low) & (r <= high))
    gaps = np.abs(np.array(found.coverage) - LEVELS)
    assert found.mean_error == pytest.approx(gaps.mean()) and found.maximum_error == pytest.approx(gaps.max())
    assert found.nll == pytest.approx(-stats.norm.logpdf(r).mean(), abs=1e-6)
    assert CoverageScores.from_dict(found.to_dict()) == found


def test_a_model_of_the_residuals_themselves_is_calibrated_and_a_wrong_scale_is_not(residuals: torch.Tensor) -> None:
    own = ResidualModel.of_residuals(residuals[::2], "gaussian", "every other row")
    assert own.scale == pytest.approx(np.sqrt(np.mean(residuals[::2].numpy() ** 2)))
    assert measured(own, residuals[1::2]).maximum_error < 0.06
    assert measured(ResidualModel("gaussian", own.scale / 2), residuals[1::2]).maximum_error > 0.25


def test_the_empirical_model_is_split_conformal() -> None:
    """The interval at level c ends at the ceil((n + 1) c)-th of n sizes, and never before the guarantee holds."""
    model = ResidualModel.of_residuals(torch.tensor([3.0, -1.0, 2.0, -4.0]), "empirical", "four rows")
    assert [model.half_width(c) for c in (0.2, 0.21, 0.4, 0.8)] == [1.0, 2.0, 2.0, 4.0]
    assert math.isinf(model.half_width(0.81))
    generator = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        sizes = np.abs(generator.standard_t(3, size=20))
        conformal = ResidualModel("empirical", sizes=tuple(sorted(sizes[:-1])))
        covered.append(sizes[-1] <= conformal.half_width(0.8))
    assert np.mean(covered) > 0.8 - 3 * math.sqrt(0.16 / 400)


def test_a_row_without_a_prediction_is_not_covered(residuals: torch.Tensor) -> None:
    residuals[3] = torch.nan
    found = measured(ResidualModel("gaussian", 1.0), residuals)
    assert found.rows == 500 and found.undefined == 1 and math.isnan(found.mean_error)


@pytest.mark.parametrize(
    "action",
    [
        lambda: ResidualModel("gaussian", 0.0), lambda: ResidualModel("empirical"),
        lambda: ResidualModel("cauchy", 1.0), lambda: CoverageSums([0.0, 0.5]), lambda: CoverageSums([]),
        lambda: CoverageSums().update(torch.ones(2), torch.ones(2)),
        lambda: ResidualModel.of_residuals(torch.tensor([1.0, math.inf]), "gaussian", ""),
        lambda: ResidualModel.of_residuals(torch.ones(0), "gaussian", ""),
        lambda: CoverageScores.of_sums(CoverageSums()._defaults, LEVELS, ResidualModel("gaussian", 1.0)),
    ],
)  # fmt: skip
def test_bad_input_to_coverage_is_refused_with_a_hint(action: Any) -> None:
    with pytest.raises(ValueError, match="HINT"):
        action()
