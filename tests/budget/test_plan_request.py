"""Tests that a plan finds what a user asks for, and that the epsilon of a run does not depend on how it was found."""

from __future__ import annotations

from typing import Any

import pytest

from lipdp_lightning.accounting.accountants import Spending, epsilon_of
from lipdp_lightning.budget import calibrate
from lipdp_lightning.privacy.plan import PrivacyPlan

REQUEST: dict[str, Any] = {
    "dataset_size": 10_000, "expected_batch_size": 100, "epsilon": 2.0, "epochs": 5, "delta": 1e-6, "scaling": "joint",
}  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_stated_epsilon_is_that_of_the_noise_whatever_was_asked_for(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration that errs spends another budget, and the run says so."""
    found = calibrate.calibrate_noise
    monkeypatch.setattr(calibrate, "calibrate_noise", lambda *a, **k: (share * found(*a, **k)[0], found(*a, **k)[1]))
    plan = PrivacyPlan.create(**REQUEST)
    stated = Spending(plan).guarantee().epsilon
    assert stated == epsilon_of("pld", plan.events(), plan.delta).epsilon
    assert (stated <= 2.0) == (share == 1.0)
