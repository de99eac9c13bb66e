"""The ledger counts every release once, and joins the queries of one sample."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.accounting.accountants import get_accountant
from lipdp_lightning.accounting.events import Ledger, LedgerEntry, join_noise_multipliers


def step(noise=1.1, rate=0.004, count=1, label=""):
    return LedgerEntry("subsampled_gaussian", noise, rate, count, label)


entries = st.builds(
    step,
    noise=st.sampled_from([0.5, 1.1]),
    rate=st.sampled_from([0.1, 1.0]),
    count=st.integers(0, 5),
    label=st.sampled_from(["", "é\n"]),
)


@given(st.lists(entries, max_size=20))
def test_merging_keeps_order_and_every_release(items):
    ledger = Ledger(items)
    flat = [dataclasses.replace(e, count=1) for e in items for _ in range(e.count)]
    assert [dataclasses.replace(e, count=1) for e in ledger for _ in range(e.count)] == flat
    assert ledger.total_steps == len(flat)
    assert all(not a.same_mechanism(b) for a, b in zip(ledger.entries, ledger.entries[1:], strict=False))
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_long_run_is_one_entry():
    ledger = Ledger()
    for _ in range(1000):
        ledger.record(step())
    assert ledger.entries == (step(count=1000),)


def test_floats_survive_json_exactly():
    entry = step(noise=0.1 + 0.2, rate=256 / 60000)
    assert Ledger.from_json(Ledger([entry]).to_json()).entries == (entry,)


@pytest.mark.parametrize(
    "text", ["[]", '{"version": 2, "entries": []}', '{"version": 1}', '{"version": 1, "entries": [{"x": 1}]}']
)
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(ValueError, match="HINT"):
        Ledger.from_json(text)


def test_bad_entries_name_all_problems():
    with pytest.raises(ValueError) as caught:
        LedgerEntry("laplace", -1.0, 1.5, -2)
    for word in ("mechanism", "noise_multiplier", "sample_rate", "count", "HINT"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="every example"):
        LedgerEntry("gaussian", 1.0, 0.5, 1)


def test_join():
    assert join_noise_multipliers([3.0]) == 3.0
    assert join_noise_multipliers([3.0, 4.0]) == pytest.approx(2.4)
    assert join_noise_multipliers([1.0, 0.0]) == 0.0
    assert join_noise_multipliers([math.inf]) == math.inf
    for wrong in ([], [1.0, -1.0], [math.nan]):
        with pytest.raises(ValueError, match="HINT"):
            join_noise_multipliers(wrong)


def test_queries_on_one_sample_are_one_event():
    """Two queries of multiplier 1.1 on each sample of the reference run: booked apart they look like 3.50."""
    rate, steps, pld = 256 / 60000, 14062, get_accountant("pld")
    joined = pld.epsilon([step(join_noise_multipliers([1.1, 1.1]), rate, steps)], 1e-5).epsilon
    apart = pld.epsilon([step(1.1, rate, steps), step(1.1, rate, steps, "quantile")], 1e-5).epsilon
    assert joined == pytest.approx(4.884, abs=0.01)
    assert apart == pytest.approx(3.498, abs=0.01)
