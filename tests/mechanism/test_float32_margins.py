"""Sums of many rows in float32: the margin of a sensitivity covers their rounding, and is not more than they need."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from private_step import Harness, make_plan, mlp
from torch import Tensor

from lipdp_lightning.layers.contribution import LARGEST_CANCELLATION
from lipdp_lightning.mechanism.allocation import sum_margin
from lipdp_lightning.mechanism.step import Mechanism

ROWS = 65_536


def stored_sums(row: Tensor) -> Tensor:
    """Sums of 0 .. ROWS copies of a row, each stored in float32, as a gradient is."""
    exact = row.double() * torch.arange(ROWS + 1, dtype=torch.float64).unsqueeze(1)
    return exact.float().double()


def largest_shift(direction: int) -> float:
    """Largest ||sum with one row more - sum|| / ||row|| over many rows whose coordinates round in step."""
    worst = 0.0
    for seed in range(40):
        value = 1 + torch.rand(1, generator=torch.Generator().manual_seed(seed))
        sums = stored_sums(value.repeat(direction))  # equal coordinates are rounded the same way
        worst = max(worst, (sums.diff(dim=0).norm(dim=1) / value.repeat(direction).double().norm()).max().item())
    return worst


def test_the_margin_covers_stored_sums_and_without_the_batch_it_does_not() -> None:
    found = largest_shift(direction=7)
    assert sum_margin(0) < 1 + 2.0**-24 * ROWS * 0.5 < found <= sum_margin(ROWS)


def margin_of(views: int, **options: Any) -> float:
    """The margin in a mechanism's sensitivities, on a network whose norms are the same in all calls."""

    def sensitivities(kind: Any) -> dict[str, float]:
        torch.manual_seed(0)
        own = Harness(mlp(), (12,), make_plan(expected_batch_size=900, dataset_size=9000, **options), kind=kind)
        found = own.mechanism.sensitivities()
        own.mechanism.close()
        return found

    plain = sensitivities(WithoutMargin)
    found = sensitivities(partial(Mechanism, views=views))
    ratios = [found[name] / plain[name] for name in plain]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-12)
    return ratios[0]


class WithoutMargin(Mechanism):
    def sensitivities(self) -> dict[str, float]:
        """Divides by the margin of one view and no partial sums, which every formula begins with."""
        return {k: v / sum_margin(900 + self.scaling.partial_sums) for k, v in super().sensitivities().items()}


SCALINGS: list[dict[str, Any]] = [
    {"scaling": "worst_case"}, {"scaling": "joint"}, {"scaling": "layerwise"}, {"scaling": "exact", "radius": 0.1},
    {"scaling": "exact_layerwise", "radius": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("views", [1, 16])
@pytest.mark.parametrize("options", SCALINGS, ids=lambda o: o["scaling"])
def test_views_and_the_partial_sums_of_exact_norms_are_rows_of_the_margin(options: dict[str, Any], views: int) -> None:
    """A sum over K views of every example has K times as many rows; exact sums cancel by up to 64 within an example."""
    own = 2 * LARGEST_CANCELLATION if options["scaling"].startswith("exact") else 0
    assert margin_of(views, **options) == pytest.approx(sum_margin((900 + own) * views), rel=1e-12)


def test_exact_sums_that_cancel_within_an_example_stay_within_the_margin() -> None:
    """Each example's gradient is a difference that is 64 times smaller than its parts, all rounded the same way."""
    parts = torch.full((5,), 1 + 2.0**-12).double()
    worst = 0.0
    for count in range(ROWS - 64, ROWS):
        whole = (parts * count + LARGEST_CANCELLATION * parts).float().double() - LARGEST_CANCELLATION * parts
        more = (parts * (count + 1) + LARGEST_CANCELLATION * parts).float().double() - LARGEST_CANCELLATION * parts
        worst = max(worst, ((more - whole).norm() / parts.norm()).item())
    assert worst <= sum_margin(ROWS + 2 * LARGEST_CANCELLATION)
