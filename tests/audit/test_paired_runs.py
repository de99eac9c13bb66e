"""Runs on neighbouring data sets, one given what the other released: no input of a mechanism moves too far.

Everything else that can be seen of the two runs is equal. Broken implementations fail the same comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_runs import BROKEN
from lightning.pytorch.callbacks import Callback
from neighbouring_runs import (
    MEANS,
    ROWS,
    OneLarge,
    PairWithMeans,
    compared,
    dropped_inputs,
    network,
    one_layer,
    pair_plan,
    row_of_choice,
    samples,
)  # fmt: skip
from small_runs import SECRET, make_module

from lipdp_lightning.audit.paired_runs import Scribe, paired_runs
from lipdp_lightning.audit.transcript import Release, Transcript, compare
from lipdp_lightning.augmentations import HorizontalFlip, ShiftedCrop
from lipdp_lightning.callbacks import AugmentationMultiplicity, ParameterAveraging


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def views() -> Sequence[Callback]:
    return [AugmentationMultiplicity(2, [ShiftedCrop(1, "zeros"), HorizontalFlip()]), ParameterAveraging()]


def with_dropout() -> Any:
    return make_module(network=dropped_inputs())


def with_one_layer() -> Any:
    return make_module(network=one_layer())


def with_adam() -> Any:
    return make_module(network=network(), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))


SOUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "joint": ({}, {}),
    "layerwise": ({"scaling": "layerwise", "allocation": "equal"}, {}),
    "exact": ({"scaling": "exact", "radius": 0.1}, {}),
    "radius": ({"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 5.0}, {"module": with_adam}),
    "switch": ({"scaling": "layerwise", "allocation": "equal", "switch_at": 0.5, "switch_to": "worst_case"}, {}),
    "statistics": ({"preliminary": MEANS}, {"data": PairWithMeans}),
    "views": ({}, {"callbacks": views, "physical_batch_size": 4}),
    "micro-batches": ({"expected_batch_size": 12, "loss_clip": 0.3}, {"physical_batch_size": 5}),
    "dropout": ({"expected_batch_size": 12}, {"module": with_dropout, "physical_batch_size": 5}),
    "all rows in every step": ({"expected_batch_size": ROWS}, {"module": with_dropout}),
    "one large row": ({"expected_batch_size": OneLarge.batch_size}, {"data": OneLarge, "module": with_one_layer}),
    "clipped examples": (
        {"scaling": "clip_flat", "clipping": "local", "clip_norm": 0.3, "max_norm": None}, {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_runs_on_neighbours_differ_in_what_the_noise_covers_alone(tmp_path: Path, name: str) -> None:
    settings, options = SOUND[name]
    plan = pair_plan(**settings)
    found = compared(tmp_path, plan, **options)
    assert not found.faults, "\n".join(found.faults)
    assert 0.1 < found.largest <= 1, "nothing moved that could be compared"
    absent = row_of_choice(plan)
    drawn = {f"step {step}" for step, sample in enumerate(samples(plan)) if absent in sample}
    moved = {n for n, size in found.moved.items() if size and n[:4] == "step"}
    assert moved <= drawn and len(moved) >= 0.9 * len(drawn)  # dropout may leave nothing of a row
    if plan.expected_batch_size == 3:
        assert [absent] in samples(plan), "no step of the second run is empty where the first run's is not"


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_follows_private_data_without_noise_is_found(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lipdp_lightning.training.model_checks.FIXED_METHODS", ())  # which would refuse some at once
    broken = BROKEN[name]
    found = compared(tmp_path, pair_plan(**broken.plan), **broken.options)
    assert any(broken.says in fault for fault in found.faults), "\n".join(found.faults) or "no fault was found"


# ---- the comparison itself


def release(name: str, *inputs: float, deviation: float = 1.0) -> Release:
    values = torch.tensor(inputs, dtype=torch.float64)
    return Release(name, values, torch.full_like(values, deviation), 1.0, ())


def faults(first: Transcript, second: Transcript, touched: tuple[str, ...] = ("a",)) -> tuple[str, ...]:
    return compare(first, second, touched).faults


def test_a_distance_up_to_the_sensitivity_is_covered_and_more_is_not() -> None:
    zero = Transcript((release("a", 0.0, 0.0),), ())
    assert not faults(zero, Transcript((release("a", 0.6, -0.8),), ()))
    (fault,) = faults(zero, Transcript((release("a", 0.6, -0.81),), ()))
    assert "1.008 times" in fault
    (fault,) = faults(zero, Transcript((release("a", 0.1, 0.0),), ()), touched=())
    assert "takes no part" in fault
    for moved in (release("a", math.nan, 0.0), release("a", 0.0)):
        (fault,) = faults(zero, Transcript((moved,), ()))
        assert "inf times" in fault


def test_an_entry_without_noise_may_not_move() -> None:
    first, second = (Transcript((release("a", value, deviation=0.0),), ()) for value in (0.0, 1e-9))
    assert not faults(first, first)
    (fault,) = faults(first, second)
    assert "inf times" in fault


def test_other_releases_or_other_shown_things_are_faults() -> None:
    first = Transcript((release("a"), release("b")), (("x", "1"), ("y", "2")))
    assert not faults(first, first)
    (fault,) = faults(first, Transcript((release("a"),), first.shown))
    assert "releases 2 things and the other 1" in fault and "nothing more" in fault
    (fault,) = faults(first, Transcript(first.releases, (("x", "1"), ("y", "3"))))
    assert fault == "y is 2 with the example and 3 without."
    (fault,) = faults(first, Transcript(first.releases, (("x", "1"), ("z", "2"))))
    assert "'y' with the example and 'z' without" in fault


def test_an_error_of_one_run_is_a_fault_and_one_of_both_is_raised() -> None:
    def run(scribe: Scribe) -> None:
        if raises(scribe):
            raise RuntimeError("a row is too large")

    def raises(scribe: Scribe) -> bool:
        return scribe.absent is None or both

    both = False
    found = paired_runs(run, 1, pair_plan(), ROWS, SECRET)
    assert found.faults and "'error' with the example and nothing more without" in found.faults[0]
    both = True
    with pytest.raises(RuntimeError, match="too large"):
        paired_runs(run, 1, pair_plan(), ROWS, SECRET)
