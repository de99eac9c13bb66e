"""Runs the protocols in one process, with the shares, noise and answers of separate processes, and everyone's view."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.releases import CurveRelease
from lipdp_lightning.privacy.keys import new_secret
from lipdp_lightning.studies.parties.costs import Traffic, count_session
from lipdp_lightning.studies.parties.kernel_sums import ThresholdCounts, UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import (
    Bytes,
    IntArray,
    SecureAggregation,
    ServerLost,
    ShareRandomness,
    Words,
)
from lipdp_lightning.studies.parties.server_noise import NamedNoise, noise_scale

SESSION_BYTES = 16


@dataclass(frozen=True)
class ServerView:
    """Everything that a server sees and draws; it never sees another server's answer or the released sum."""

    server: int
    messages: Bytes
    noise: IntArray
    answer: Words


@dataclass(frozen=True)
class Outcome:
    """A release, and what was seen on the way. `values` is the sum plus the noise of every opening server."""

    values: IntArray
    opening: tuple[int, ...]
    views: tuple[ServerView, ...]
    traffic: Traffic


def new_session() -> bytes:
    """Returns a public name that no other session has."""
    return secrets.token_bytes(SESSION_BYTES)


def make_release(protocol: SecureAggregation, statistic: UStatistic, epsilon: float, session: bytes) -> CurveRelease:
    """Returns the cost of a session, for the caller's list of releases."""
    name = f"{type(statistic).__name__} among parties by {protocol.name}, session {session.hex()}"
    return CurveRelease(name, "discrete_laplace", epsilon, 0.0, "replace_one")


def asked_thresholds(statistic: UStatistic) -> int:
    return len(statistic.thresholds) if isinstance(statistic, ThresholdCounts) else 0


def choose_opening(protocol: SecureAggregation, available: Sequence[int]) -> tuple[int, ...]:
    """Returns the servers that answer, the first of those available."""
    if len(available) < protocol.openers:
        raise ServerLost(
            f"{len(available)} of {protocol.servers} servers are left, and {protocol.openers} must answer.\n"
            "HINT: run the session again; ShamirSharing(servers, threshold) needs only `threshold` of its servers."
        )
    return tuple(available[: protocol.openers])


def run_in_memory(
    protocol: SecureAggregation,
    statistic: UStatistic,
    records: npt.ArrayLike,
    epsilon: float,
    *,
    secret: bytes | None = None,
    session: bytes | None = None,
    charge: Callable[[CurveRelease], None] = lambda release: None,
) -> Outcome:
    """Releases the statistic of the records (one row per party) with epsilon-DP under replace-one.

    Args:
        protocol, statistic, records, epsilon: what is released, and how.
        secret: replaces the system's random secrets of parties and servers; for tests.
        session: a public name, which must be new for other records under the same secret.
        charge: called with the cost (a `ReleaseList`'s `record`) once every answer is there, before the sum is put
            together.
    """
    rows = statistic.check(records)
    scale = noise_scale(statistic.cost, epsilon)
    name = session or new_session()
    messages = protocol.share(statistic, rows, ShareRandomness(secret or new_secret(), name))
    lengths = [array.shape for array in messages]
    assert lengths == [(rows.shape[0], protocol.message_bytes(s, statistic)) for s in range(protocol.servers)]
    opening = choose_opening(protocol, range(protocol.servers))
    views = []
    for server in range(protocol.servers):
        # a fixed secret must not make all servers draw the same noise
        own = new_secret() if secret is None else bytes([server]) + secret
        noise = statistic.noise(NamedNoise(own, name, scale))
        state = protocol.collect(server, statistic, name, messages[server])
        share = protocol.answer(server, statistic, state)
        answer = protocol.add_noise(server, share, noise, opening) if server in opening else np.zeros_like(share)
        views.append(ServerView(server, messages[server], noise, answer))
    charge(make_release(protocol, statistic, epsilon, name))
    values = protocol.combine(opening, {server: views[server].answer for server in opening})
    traffic = count_session(protocol, statistic, rows.shape[0], asked_thresholds(statistic))
    return Outcome(values, opening, tuple(views), traffic)
