"""What a server sees does not depend on the records, and nobody can strip all the noise.

The check itself is tested: protocols that leak must fail it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from lipdp_lightning.curves.discrete_noise import discrete_laplace_variance
from lipdp_lightning.studies.parties import (
    AdditiveSharing,
    FunctionSharing,
    ShamirSharing,
    TableSharing,
    ThresholdCounts,
    TrustedCurator,
    run_in_memory,
)
from lipdp_lightning.studies.parties.one_process import Outcome
from lipdp_lightning.studies.parties.secure_aggregation import SecureAggregation, ShareRandomness
from lipdp_lightning.studies.parties.server_noise import noise_scale

SESSIONS = 100
STATISTIC = ThresholdCounts(6, (5, 31, 50))
LOW = np.array([[0, 1]] * 64)
HIGH = np.array([[63, 1]] * 64)
PROTOCOLS: list[SecureAggregation] = [
    AdditiveSharing(2),
    AdditiveSharing(3, seeded=True),
    TableSharing(2),
    ShamirSharing(3, 2),
    FunctionSharing(),
]


def label(protocol: SecureAggregation) -> str:
    return type(protocol).__name__


def run(protocol: SecureAggregation, records: np.ndarray, number: int) -> Outcome:
    secret, session = number.to_bytes(16, "big"), number.to_bytes(4, "big")
    return run_in_memory(protocol, STATISTIC, records, 1.0, secret=secret, session=session)


def bytes_seen(protocol: SecureAggregation, outcome: Outcome, server: int) -> np.ndarray:
    """A server's view, and what it can compute from it without knowing more."""
    view = outcome.views[server]
    share = protocol.answer(server, STATISTIC, protocol.collect(server, STATISTIC, b"", view.messages))
    parts = [view.messages.reshape(-1), view.answer.view(np.uint8)]
    if not isinstance(protocol, FunctionSharing):  # its session's name is not b""
        parts.append(share.view(np.uint8))
    width = view.messages.shape[1] // 8 * 8
    sums = np.ascontiguousarray(view.messages[:, :width]).view("<u8").sum(axis=0, dtype=np.uint64)
    return np.concatenate([*parts, sums.view(np.uint8)])


def distinguishable(low: np.ndarray, high: np.ndarray) -> bool:
    """Some bit of the rows has another frequency in the two worlds (at 6 standard deviations)."""
    p, q = (np.unpackbits(rows, axis=1).mean(axis=0) for rows in (low, high))
    spread = np.sqrt((p * (1 - p) + q * (1 - q)) / SESSIONS + 1e-9)
    return bool((np.abs(p - q) / spread).max() > 6)


@functools.cache
def outcomes(protocol: SecureAggregation) -> list[list[Outcome]]:
    worlds = ((LOW, 0), (HIGH, SESSIONS))
    return [[run(protocol, x, k + start) for k in range(SESSIONS)] for x, start in worlds]


def views(protocol: SecureAggregation, server: int, see: Callable[..., np.ndarray] = bytes_seen) -> list[np.ndarray]:
    return [np.stack([see(protocol, outcome, server) for outcome in world]) for world in outcomes(protocol)]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=label)
def test_no_server_sees_anything_of_the_records(protocol: SecureAggregation) -> None:
    for server in range(protocol.servers):
        assert not distinguishable(*views(protocol, server))


class CollectingLeader(AdditiveSharing):
    """Broken: all shares are sent to the first server, which is to add them up and add noise once."""

    def share(self, statistic, records, randomness):
        shares = super().share(statistic, records, randomness)
        words = [share.view("<u8") for share in shares]
        shares[0] = np.ascontiguousarray(words[0] + words[1]).view(np.uint8)
        shares[1] = np.zeros_like(shares[1])
        return shares


class ForgottenCoefficient(ShamirSharing):
    """Broken: the polynomial's leading coefficient is left out, so every share is the secret."""

    def share(self, statistic, records, randomness):
        secret = statistic.contributions(records).astype("<u8")
        return [np.ascontiguousarray(secret).view(np.uint8).reshape(len(records), -1)] * self.servers


class BareKeys(FunctionSharing):
    """Broken: a key carries its party's record in its last bytes."""

    def share(self, statistic, records, randomness):
        keys = super().share(statistic, records, randomness)
        keys[0][:, -8:] = records[:, :1].astype("<u8").view(np.uint8)
        return keys


@pytest.mark.parametrize(
    "broken", [CollectingLeader(2), ForgottenCoefficient(3, 2), BareKeys(), TrustedCurator()], ids=label
)
def test_the_view_test_catches_a_server_that_sees(broken: SecureAggregation) -> None:
    assert distinguishable(*views(broken, 0))


def messages(protocol: SecureAggregation, records: np.ndarray, number: int) -> list[np.ndarray]:
    randomness = ShareRandomness(number.to_bytes(16, "big"), number.to_bytes(4, "big"))
    return protocol.share(STATISTIC, records, randomness)


def two_rounds(protocol: SecureAggregation, server: int, second_session: int) -> list[np.ndarray]:
    """What a server has after two rounds in which only the second round's records differ between the worlds."""
    rows: list[list[np.ndarray]] = [[], []]
    for world, records in enumerate((LOW, HIGH)):
        for k in range(SESSIONS):
            number = 1000 + 2 * k + world * 2 * SESSIONS
            first = messages(protocol, LOW, number)[server]
            again = messages(protocol, records, number + second_session)[server]
            width = first.shape[1] // 8 * 8
            difference = first[:, :width].copy().view("<u8") - again[:, :width].copy().view("<u8")
            rows[world].append(
                np.concatenate([difference.reshape(-1).view(np.uint8), first.reshape(-1) ^ again.reshape(-1)])
            )
    return [np.stack(world) for world in rows]


@pytest.mark.parametrize("protocol", [AdditiveSharing(2), ShamirSharing(3, 2), FunctionSharing()], ids=label)
def test_fresh_coins_hide_two_rounds_and_reused_coins_do_not(protocol: SecureAggregation) -> None:
    server = protocol.servers - 1
    assert not distinguishable(*two_rounds(protocol, server, second_session=1))
    assert distinguishable(*two_rounds(protocol, server, second_session=0))


def residuals(protocol: SecureAggregation, server: int) -> np.ndarray:
    """What is left of the noise for a server that also sees the release and takes its own noise away."""
    truth = STATISTIC.contributions(HIGH).sum(axis=0)
    rows = []
    for outcome in outcomes(protocol)[1]:
        own = outcome.views[server].noise if server in outcome.opening else 0
        rows.append(outcome.values - own - truth)
    return np.stack(rows)


def enough_noise(rest: np.ndarray) -> bool:
    """About the variance of one server's noise at least: a discrete Laplace variable per node on a path."""
    one = (STATISTIC.levels + 1) * discrete_laplace_variance(noise_scale(STATISTIC.cost, 1.0))
    return bool(rest.var(axis=0).min() > 0.5 * one)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=label)
def test_a_server_that_sees_the_release_still_faces_the_noise_of_another(protocol: SecureAggregation) -> None:
    for server in range(protocol.servers):
        assert enough_noise(residuals(protocol, server))


class NoiseOnOneServer(AdditiveSharing):
    """Broken: only the first server adds noise, and can take it away again."""

    def add_noise(self, server, answer, noise, opening):
        return answer + noise.astype(np.uint64) if server == 0 else answer


def test_noise_of_one_server_alone_is_not_enough() -> None:
    assert enough_noise(residuals(NoiseOnOneServer(2), 1))
    assert not enough_noise(residuals(NoiseOnOneServer(2), 0))


@pytest.mark.parametrize("protocol", [AdditiveSharing(3), ShamirSharing(4, 3), FunctionSharing()], ids=label)
def test_answers_but_one_say_nothing(protocol: SecureAggregation) -> None:
    """What the analyst holds when a server is lost in the opening, for which nothing is charged."""

    def partial(protocol: SecureAggregation, outcome: Outcome, missing: int) -> np.ndarray:
        kept = [outcome.views[s].answer for s in outcome.opening if s != outcome.opening[missing]]
        return np.concatenate([*kept, np.sum(kept, axis=0, dtype=np.uint64)]).view(np.uint8)

    for missing in range(protocol.openers):
        assert not distinguishable(*views(protocol, missing, partial))


def test_all_answers_do_say_something() -> None:
    def everything(protocol: SecureAggregation, outcome: Outcome, server: int) -> np.ndarray:
        return (outcome.values > 32).astype(np.uint8)

    assert distinguishable(*views(AdditiveSharing(2), 0, everything))
