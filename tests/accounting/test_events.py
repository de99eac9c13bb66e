"""The ledger counts every release once, and joins the queries of one sample."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import LedgerEntry, join_noise_multipliers
from lipdp_lightning.accounting.privacy_curves import collect


def step(noise=1.1, rate=0.004, count=1, label=""):
    return LedgerEntry("subsampled_gaussian", noise, rate, count, label)


entries = st.builds(
    step,
    noise=st.sampled_from([0.5, 1.1, 0.1 + 0.2]),
    rate=st.sampled_from([0.1, 256 / 60000, 1.0]),
    count=st.integers(0, 5),
    label=st.sampled_from(["", "é\n"]),
)


@given(st.lists(entries, max_size=20))
def test_every_release_of_a_ledger_is_counted_once_in_whatever_order(items):
    ledger = collect(items)
    sampled = [entry for entry in items if entry.sample_rate < 1 and entry.count]
    assert sum(count for _, rate, count in ledger if rate < 1) == sum(entry.count for entry in sampled)
    precision = sum(entry.count / entry.noise_multiplier**2 for entry in items if entry.sample_rate == 1)
    assert sum(1 / noise**2 for noise, rate, _ in ledger if rate == 1) == pytest.approx(precision)
    assert collect(reversed(items)) == ledger


@given(entries)
def test_an_entry_survives_json_exactly(entry):
    """A search keeps the ledgers of its trials as JSON, a run its own in the report."""
    assert LedgerEntry(**json.loads(json.dumps(dataclasses.asdict(entry)))) == entry


def test_bad_entries_name_all_problems():
    with pytest.raises(ValueError) as caught:
        LedgerEntry("cauchy", -1.0, 1.5, -2)
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
    rate, steps = 256 / 60000, 14062
    joined = epsilon_of("pld", [step(join_noise_multipliers([1.1, 1.1]), rate, steps)], 1e-5).epsilon
    apart = epsilon_of("pld", [step(1.1, rate, steps), step(1.1, rate, steps, "quantile")], 1e-5).epsilon
    assert joined == pytest.approx(4.884, abs=0.01)
    assert apart == pytest.approx(3.498, abs=0.01)
