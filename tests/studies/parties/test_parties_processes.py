"""Sessions between processes: the release, what is counted, and what happens when someone disappears."""

from __future__ import annotations

import os
import time

import broken_parties as broken
import numpy as np
import pytest

from lipdp_lightning.studies.parties import (
    AdditiveSharing,
    FunctionSharing,
    PartyLost,
    ProcessSession,
    ProtocolError,
    ServerLost,
    ShamirSharing,
    ThresholdCounts,
    TrustedCurator,
)
from lipdp_lightning.studies.parties.costs import count_session

RECORDS = np.array([[3, 1], [200, 1], [90, 0], [255, 1]])
STATISTIC = ThresholdCounts(8, (0, 89, 199, 254))
TRUTH = STATISTIC.contributions(RECORDS).sum(axis=0)
NO_NOISE = 1e5
PATIENT = 120.0  # seconds: on a busy machine processes start late


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def ended(session: ProcessSession) -> bool:
    """Every process of the session is gone, and there were as many as announced."""
    expected = RECORDS.shape[0] + session.setting.protocol.servers
    return len(session.process_ids) == expected and not any(alive(p) for p in session.process_ids.values())


@pytest.mark.parametrize("protocol", [TrustedCurator(), AdditiveSharing(3), ShamirSharing(3, 2), FunctionSharing()])
def test_release_bytes_and_charge(protocol) -> None:
    charges = []
    session = ProcessSession(
        protocol, STATISTIC, RECORDS, NO_NOISE, charge=charges.append, record_views=True, seconds=PATIENT
    )
    with session:
        assert len(set(session.process_ids.values()) | {os.getpid()}) == len(session.process_ids) + 1
        assert np.array_equal(session.query(), TRUTH)
    assert [(c.epsilon, c.delta, c.adjacency) for c in charges] == [(NO_NOISE, 0.0, "replace_one")]
    assert session.traffic == count_session(protocol, STATISTIC, 4, 4)
    assert sorted(view.server for view in session.views) == list(range(protocol.openers))
    assert ended(session)


def test_function_sharing_answers_again_without_the_parties_and_charges_once() -> None:
    charges = []
    with ProcessSession(FunctionSharing(), STATISTIC, RECORDS, 0.5, charge=charges.append, seconds=PATIENT) as session:
        pids = [pid for name, pid in session.process_ids.items() if name.startswith("party")]
        assert not any(alive(pid) for pid in pids)
        first = session.query()
        assert np.array_equal(session.query((254, 0)), first[[3, 0]])  # the same release, hence the same noise
        assert session.query((7,)).shape == (1,)
        with pytest.raises(ValueError, match="HINT"):
            session.query((256,))
    assert len(charges) == 1


def test_shares_of_sums_open_once() -> None:
    with ProcessSession(AdditiveSharing(2), STATISTIC, RECORDS, 1.0, seconds=PATIENT) as session:
        session.query()
        with pytest.raises(ValueError, match="HINT"):
            session.query()
        with pytest.raises(ValueError, match="HINT"):
            session.query((3,))


def test_two_sessions_have_different_noise() -> None:
    """The noise has a scale of millions: one of the four counts is equal in fewer than one of 10^6 runs."""
    releases = []
    for _ in range(2):
        with ProcessSession(AdditiveSharing(2), STATISTIC, RECORDS, 1e-6, seconds=PATIENT) as session:
            releases.append(session.query())
    assert not np.any(releases[0] == releases[1])


@pytest.mark.parametrize(
    "party",
    [
        broken.vanishes_at_once,
        broken.vanishes_between_servers,
        broken.vanishes_in_a_message,
        broken.takes_anothers_name,
        broken.sends_twice,  # coins of two tries do not fit together
    ],
)
def test_a_party_that_disappears(party) -> None:
    charges = []
    session = ProcessSession(
        AdditiveSharing(2), STATISTIC, RECORDS, 1.0, charge=charges.append, party=party, seconds=PATIENT
    )
    with pytest.raises(PartyLost, match=r"parties \[1\].*no budget was charged(.|\n)*HINT"), session:
        session.query()
    assert not charges
    assert ended(session)


def test_a_silent_party_is_not_waited_for_longer_than_announced() -> None:
    charges = []
    session = ProcessSession(
        FunctionSharing(), STATISTIC, RECORDS, 1.0, charge=charges.append, party=broken.stays_silent, seconds=4.0
    )
    start = time.monotonic()
    with pytest.raises(ProtocolError, match="no budget was charged"), session:
        session.query()
    assert time.monotonic() - start < 10
    assert not charges
    assert ended(session)


def test_a_lost_server_ends_additive_sharing_but_not_shamir() -> None:
    charges = []
    session = ProcessSession(
        AdditiveSharing(2),
        STATISTIC,
        RECORDS,
        1.0,
        charge=charges.append,
        server=broken.server_1_never_starts,
        seconds=PATIENT,
    )
    with pytest.raises(ServerLost, match="no budget was charged"), session:
        session.query()
    assert not charges
    with ProcessSession(
        ShamirSharing(3, 2),
        STATISTIC,
        RECORDS,
        NO_NOISE,
        charge=charges.append,
        server=broken.server_1_never_starts,
        seconds=PATIENT,
    ) as session:
        assert np.array_equal(session.query(), TRUTH)
    assert len(charges) == 1


@pytest.mark.parametrize("protocol", [AdditiveSharing(2), ShamirSharing(3, 2), FunctionSharing()])
def test_a_server_lost_in_the_opening(protocol) -> None:
    charges = []
    session = ProcessSession(
        protocol,
        STATISTIC,
        RECORDS,
        1.0,
        charge=charges.append,
        server=broken.server_1_vanishes_at_the_opening,
        seconds=PATIENT,
    )
    with pytest.raises(ServerLost, match="no budget was charged"), session:
        session.query()
    assert not charges
    assert ended(session)


def test_a_session_is_bounded() -> None:
    with pytest.raises(ValueError, match="HINT"):
        ProcessSession(AdditiveSharing(2), STATISTIC, np.ones((33, 2), int), 1.0)
    with pytest.raises(ValueError, match="HINT"):
        ProcessSession(AdditiveSharing(2), STATISTIC, RECORDS, 1.0, seconds=1e9)
    with pytest.raises(ValueError, match="HINT"):
        ProcessSession(AdditiveSharing(2), STATISTIC, RECORDS, 0.0)
