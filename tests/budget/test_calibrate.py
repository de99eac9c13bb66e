"""Calibration: certified epsilon at most the target, and little noise or few steps to spare."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.accounting.accountants import AccountantFallbackWarning
from lipdp_lightning.budget.calibrate import calibrate_noise, privacy_bound, steps_for_epochs
from lipdp_lightning.studies.reproduce.reaccounting import steps_for


def epsilon(noise, delta, rate, steps, accountant, adjacency="add_remove", rows=1):
    return privacy_bound(noise, delta, rate, steps, accountant, adjacency, rows).epsilon


CASES = [
    (1.0, 1e-5, 0.01, 1000, "pld", "add_remove", 1),
    (8.0, 1e-6, 0.05, 500, "pld", "replace_one", 1),
    (0.1, 1e-6, 0.01, 1000, "rdp", "add_remove", 1),
    (50.0, 1e-5, 0.01, 1000, "rdp", "replace_one", 1),
    (2.0, 1e-5, 1.0, 10, "pld", "add_remove", 1),
    (3.0, 1e-5, 0.01, 100, "pld", "add_remove", 3),
    (8.0, 1e-5, 0.5, 10, "prv", "add_remove", 1),
    pytest.param(4.0, 1e-5, 0.5, 10, "prv", "replace_one", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("target", "delta", "rate", "steps", "name", "adjacency", "rows"), CASES)
def test_noise_round_trip(target, delta, rate, steps, name, adjacency, rows):
    noise, _ = calibrate_noise(target, delta, rate, steps, name, adjacency, rows)
    assert epsilon(noise, delta, rate, steps, name, adjacency, rows) <= target
    assert epsilon(noise * (1 - 1e-3), delta, rate, steps, name, adjacency, rows) > target


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_noise_round_trip_of_the_reference_run(adjacency):
    noise, bound = calibrate_noise(3.0, 1e-5, 256 / 60000, 14062, "prv", adjacency)
    assert bound.accountant == ("prv" if adjacency == "add_remove" else "pld") and 2.99 < bound.epsilon <= 3.0
    assert epsilon(noise * (1 - 1e-3), 1e-5, 256 / 60000, 14062, "prv", adjacency) > 3.0


def test_the_bound_returned_is_that_of_the_noise_returned():
    noise, bound = calibrate_noise(2.0, 1e-5, 0.02, 300, "pld")
    assert bound == privacy_bound(noise, 1e-5, 0.02, 300, "pld")


@pytest.mark.parametrize(
    ("target", "noise", "name"),
    [
        (2.4, 1.1, "pld"),
        (0.9, 5.0, "rdp"),
        pytest.param(2.0, 1.0, "rdp", marks=pytest.mark.slow),
        pytest.param(3.0, 3.0, "pld", marks=pytest.mark.slow),
    ],
)
def test_steps_round_trip(target, noise, name):
    rate = 256 / 60000 if noise < 2 else 0.5
    steps = steps_for(target, 1e-5, rate, noise, name)
    assert epsilon(noise, 1e-5, rate, steps, name) <= target
    assert epsilon(noise, 1e-5, rate, steps + max(1, steps // 1000), name) > target


def test_steps_and_noise_are_inverse():
    noise, _ = calibrate_noise(2.0, 1e-5, 0.01, 5000, "rdp")
    assert 5000 <= steps_for(2.0, 1e-5, 0.01, noise, "rdp") <= 5020


def test_out_of_reach_says_so():
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"out of reach.*\n?HINT"),
    ):
        warnings.simplefilter("error")  # fallbacks on the way are not the user's concern
        calibrate_noise(1e-9, 1e-12, 0.9, 10**6, "rdp")
    with pytest.raises(ValueError, match=r"asks for no noise"):
        calibrate_noise(1.0, 1e-2, 1e-4, 10, "pld")
    with pytest.raises(ValueError, match=r"one step .* already spends"):
        steps_for(0.1, 1e-5, 0.9, 0.5, "rdp")
    with pytest.raises(ValueError, match=r"far too large"):
        steps_for(5.0, 1e-5, 1e-6, 1e4, "rdp")


@pytest.mark.parametrize(
    ("target", "delta", "rate"), [(0.0, 1e-5, 0.1), (float("inf"), 1e-5, 0.1), (1.0, 0.0, 0.1), (1.0, 1e-5, 1.5)]
)
def test_bad_targets_are_refused(target, delta, rate):
    with pytest.raises(ValueError, match="HINT"):
        calibrate_noise(target, delta, rate, 10, "pld")
    with pytest.raises(ValueError, match="HINT"):
        steps_for(target, delta, rate, 1.0, "pld")


def test_a_fallback_of_the_answer_is_reported_once():
    with pytest.warns(AccountantFallbackWarning, match="prv failed") as caught:
        _, bound = calibrate_noise(2.0, 1e-5, 1e-3, 10**6, "prv")
    assert bound.accountant == "pld" and bound.epsilon <= 2.0
    assert len([w for w in caught if w.category is AccountantFallbackWarning]) == 1


@given(st.integers(1, 10**6), st.integers(1, 1000), st.integers(1, 200))
def test_steps_for_epochs_is_the_least_number_that_suffices(size, batch, epochs):
    batch = min(batch, size)
    steps = steps_for_epochs(epochs, size, batch)
    assert steps * batch >= epochs * size > (steps - 1) * batch


def test_steps_for_epochs_of_the_reference_run_and_of_fractions():
    assert steps_for_epochs(60, 60000, 256) == 14063  # 14062.5
    assert steps_for_epochs(0.1, 1000, 10) == 10  # 0.1 is a little more than a tenth
    assert steps_for_epochs(1e-6, 10, 10) == 1
