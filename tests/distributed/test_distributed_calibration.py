"""Calibration of rows that two processes share unequally."""

from __future__ import annotations

import pytest
from worlds import Worlds


@pytest.mark.slow
def test_two_processes_measure_what_one_does(worlds: Worlds) -> None:
    (one,) = worlds.run("calibration", 1)
    two = worlds.run("calibration", 2)
    for rank in two:
        assert rank["sums"] == one["sums"] and rank["sums"]["rows"] == 500  # 3 rows and 497, to the last bit
        assert rank["seen"]["scores"]["rows"] == one["seen"]["scores"]["rows"] == 41
        assert rank["logged"] == two[0]["logged"] and rank["temperature"] == two[0]["temperature"]
        assert rank["logged"] == pytest.approx(one["logged"], rel=1e-5)  # the same training, without noise
        assert rank["seen"]["scores"]["diagram"]["rows"] == one["seen"]["scores"]["diagram"]["rows"]
        assert rank["temperature"] == pytest.approx(one["temperature"], rel=1e-4)
    assert one["logged"]["validation/nll"] < one["logged"]["validation/nll_without_temperature"]
