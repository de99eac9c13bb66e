"""Exponents and arithmetic: known laws are found, and counts are those made by hand."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from lipdp_lightning.bench.contender_rows import Row
from lipdp_lightning.bench.step_counts import (
    NOISE_AT_ONCE,
    Counts,
    count,
    count_certificate,
    memory_lines,
)
from lipdp_lightning.mechanism.noise import Place, StepNoise, Sum
from lipdp_lightning.mechanism.reductions import release_
from lipdp_lightning.studies.gpu_estimate import Assumed, Launches, Passes, Step, count_passes, estimate
from lipdp_lightning.studies.growth import SERIES, fit, laws_of


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(exponent: float) -> None:
    law = fit("batch", "step", [(size, 3e-3 * size**exponent) for size in (64.0, 256.0, 1024.0)])
    assert law.exponent == pytest.approx(exponent, abs=1e-9) and law.r_squared == pytest.approx(1.0)


def test_what_a_line_does_not_explain_lowers_r_squared() -> None:
    assert fit("batch", "step", [(1.0, 1.0), (2.0, 8.0), (4.0, 2.0)]).r_squared < 0.5


def test_laws_are_of_both_steps_and_of_parts_that_can_be_timed_everywhere() -> None:
    series = next(s for s in SERIES if s.name == "depth")
    rows = []
    for number, (model, batch) in enumerate(series.cells):
        layers = int(model.rpartition("x")[2])
        rows.append(Row(model, batch, "torch", seconds=1e-3 * layers))
        fleeting = {"projection": 1e-7 if number == 0 else 1e-3}
        rows.append(Row(model, batch, "joint", seconds=2e-3 * layers, parts={"noise": 1e-3, **fleeting}))
    found = {law.quantity: law.exponent for law in laws_of(series, rows)}
    assert found == {
        "step without privacy": pytest.approx(1), "our step": pytest.approx(1), "ours: noise": pytest.approx(0),
    }  # fmt: skip
    assert "step without privacy" not in {law.quantity for law in laws_of(series, rows[1:])}


def test_operations_and_kept_bytes_of_a_small_network_are_those_made_by_hand() -> None:
    counts = count("mlp-8x2")
    # 8 -> 8 -> 10: forward 2 n m each; backward the same for each weight, and for the input of the second layer
    assert counts.parameters == 8 * 8 + 8 + 8 * 10 + 10
    assert counts.operations == 2 * (64 + 80) + 2 * (64 + 80) + 2 * 80
    inputs = 4 * (8 + 8)  # of both layers
    assert inputs <= counts.saved <= 8 * inputs
    assert counts.references == 4 * (8 * 8 + 8 * 10)
    assert count("wrn-10-1").references > 3.9 * (count("wrn-10-1").parameters - 1000)


def test_gradients_per_example_take_a_gradient_for_each() -> None:
    _, lines = memory_lines([Counts("m", 10**6, 10**5, 1, 4 * 10**6)], [100])
    assert lines[0][-4:] == ["14 MB", "18 MB", "18 MB", "414 MB"]


def test_a_release_holds_what_is_counted_for_a_piece() -> None:
    parameter = torch.zeros(10**6)
    for step in range(2):  # what is imported and kept is made in the first one
        noise = StepNoise.of(bytes(16), step, Place(), bytes(32))
        tracemalloc.start()
        try:
            release_([Sum(parameter, 1.0)], noise)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert 0.5 * NOISE_AT_ONCE <= peak <= 1.1 * NOISE_AT_ONCE


def test_launches_of_a_certificate_are_counted() -> None:
    counted = count_certificate("mlp-200x2", 3, 0.002)
    assert count_certificate("mlp-200x2", 3, 0.002) == counted
    assert counted.launches > 20


def test_the_estimate_adds_up_and_shrinks_with_gpus_only_where_work_is_shared() -> None:
    counts, launches = Counts("m", 10**7, 10**5, 10**10, 10**7), Launches(100, 50, 2, 80)
    passes, rows = Passes(10**6, 100, ((10**6, 100, 10**5, 10**3),)), 65_536

    def steps(precision: str = "bf16", **rates: float) -> list[Step]:
        sizes = (1, 8, 64)
        return [estimate(counts, passes, launches, rows, n, precision, Assumed(**rates), 1e6) for n in sizes]  # type: ignore[arg-type]

    one, eight, many = steps()
    assert one.sum_over_gpus == 0 and many.sum_over_gpus > eight.sum_over_gpus, "nodes are farther apart"
    assert eight.passes == pytest.approx(one.passes / 8) and many.norms == pytest.approx(one.norms / 64)
    assert eight.weights == one.weights == many.weights
    assert eight.sum_over_gpus == pytest.approx(2 * 2 * 4e7 * 7 / 8 / 200e9)
    assert one.total == pytest.approx(sum(one.parts) + one.waits) and min(one.parts[:-1]) > 0 and one.total > one.plain
    slower = steps(own_bf16=30e12)[0]
    assert slower.gradients > one.gradients and slower.passes == one.passes and slower.plain == one.plain
    whole = steps("float32")[0]
    assert whole.passes + whole.gradients == pytest.approx(whole.plain) and whole.plain > one.plain
    assert whole.launches == pytest.approx((150 + 2 * 400) * 8e-6), "sums in pieces are launched one by one"
    bound = steps(launch=1.0)[0]
    assert bound.plain == 80 and bound.total == 150 + bound.waits


def test_passes_are_counted_by_row() -> None:
    found = count_passes("mlp-table")
    assert found.layers == ((104 * 128, 1, 104, 128), (128 * 64, 1, 128, 64), (64 * 2, 1, 64, 2))
    assert found.bytes > 4 * (104 + 128 + 64) and found.launches > 6
