"""Callers of a server that are silent, slow or send nonsense delay nobody, and end no session."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lipdp_lightning.privacy.keys import new_secret
from lipdp_lightning.studies.parties import AdditiveSharing, ThresholdCounts
from lipdp_lightning.studies.parties.costs import ANALYST
from lipdp_lightning.studies.parties.roles import Server, Setting, collect_messages, deliver, party_name
from lipdp_lightning.studies.parties.secure_aggregation import ProtocolError, ShareRandomness
from lipdp_lightning.studies.parties.transport import (
    DATA,
    HOST,
    SEAL,
    STATUS,
    LinkClosed,
    TamperedMessage,
    call,
    new_identities,
    read_exactly,
)

STATISTIC = ThresholdCounts(8, (0, 89, 199, 254))
RECORDS = np.array([[3, 1], [200, 1], [90, 0]])


class Session:
    """One server in a thread, and what three honest parties and the analyst do with it."""

    def __init__(self, seconds: float) -> None:
        self.setting = Setting(b"s" * 16, AdditiveSharing(2), STATISTIC, 1.0, 3, seconds)
        names = [ANALYST, "server 0", "server 1", *map(party_name, range(3))]
        self.identities = new_identities(names)
        self.server = Server(self.setting, self.identities["server 0"], 0)
        self.listener = socket.create_server((HOST, 0), backlog=200)
        self.port = self.listener.getsockname()[1]
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._collect, daemon=True)
        self.thread.start()

    def _collect(self) -> None:
        try:
            collect_messages(self.server, self.listener)
        except BaseException as error:
            self.failure = error

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=10)

    def deliver(self, party: int) -> None:
        coins = ShareRandomness(new_secret(), self.setting.session)
        shares = self.setting.protocol.share(STATISTIC, RECORDS[party : party + 1], coins)
        deliver(self.setting, self.identities[party_name(party)], 0, self.port, shares[0][0].tobytes())

    def seal(self) -> bytes:
        link = call(self.connect(), self.identities[ANALYST], "server 0", self.setting.session)
        link.send(SEAL)
        return link.receive(STATUS)[1]


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(seconds=40.0)
    yield made
    made.listener.close()


def silent(session: Session, keep: list[Any]) -> None:
    keep += [session.connect() for _ in range(40)]  # more than a session of three parties takes


def slow(session: Session, keep: list[Any]) -> None:
    connection = session.connect()
    keep.append(connection)

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                connection.sendall(b"\x01")
                time.sleep(0.2)

    threading.Thread(target=drip, daemon=True).start()


def garbage(session: Session, keep: list[Any]) -> None:
    for size in (1, 38, 1000, 1 << 20):
        connection = session.connect()
        keep.append(connection)
        with contextlib.suppress(OSError):
            connection.sendall(os.urandom(size))


def breaks_off(session: Session, keep: list[Any]) -> None:
    for _ in range(40):
        session.connect().close()


def silent_after_the_handshake(session: Session, keep: list[Any]) -> None:
    """Somebody who is enrolled, and says nothing."""
    keep.append(call(session.connect(), session.identities["server 1"], "server 0", session.setting.session))
    keep.append(call(session.connect(), session.identities["party 2"], "server 0", session.setting.session))


@pytest.mark.parametrize("attack", [silent, slow, garbage, breaks_off, silent_after_the_handshake])
def test_honest_parties_finish_at_once_whatever_others_do(session: Session, attack: Any) -> None:
    keep: list[Any] = []
    attack(session, keep)
    start = time.monotonic()
    for party in range(3):
        session.deliver(party)
    assert session.seal() == bytes([0b111])
    assert time.monotonic() - start < session.setting.link_seconds, "somebody was waited for"
    session.thread.join(5)
    assert session.failure is None and not session.thread.is_alive()


@pytest.mark.parametrize("enrolled", [False, True])
def test_a_silent_caller_has_its_time_and_is_closed_while_the_session_goes_on(enrolled: bool) -> None:
    session = Session(seconds=8.0)
    caller = session.connect()
    if enrolled:
        caller = call(caller, session.identities["party 2"], "server 0", session.setting.session)._connection
    caller.settimeout(session.setting.link_seconds + 3)
    start = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        while caller.recv(100):
            pass
    assert time.monotonic() - start < session.setting.link_seconds + 2
    for party in range(2):
        session.deliver(party)
    assert session.seal() == bytes([0b011])
    session.listener.close()


def test_a_message_after_the_seal_does_not_count(session: Session) -> None:
    late = call(session.connect(), session.identities["party 2"], "server 0", session.setting.session)
    for party in range(2):
        session.deliver(party)
    assert session.seal() == bytes([0b011])
    with contextlib.suppress(ProtocolError):
        late.send(DATA, b"x" * session.setting.protocol.message_bytes(0, STATISTIC))
        late.receive(DATA)
    assert sorted(session.server.messages) == [0, 1]


def test_a_slow_sender_has_its_time_once_and_not_per_byte() -> None:
    here, there = socket.socketpair()
    here.settimeout(0.3)

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                there.sendall(b"x")
                time.sleep(0.1)

    threading.Thread(target=drip, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(LinkClosed):
        read_exactly(here, 1000, "somebody")
    assert time.monotonic() - start < 3
    here.close()


def test_a_caller_that_has_shown_nothing_cannot_announce_a_large_frame(session: Session) -> None:
    """Its frame would be kept in memory before anybody knows who it is."""
    connection = session.connect()
    hello = b"\x01" + b"p" + bytes(4)
    connection.sendall(hello + session.identities["party 0"].public["party 0"])
    read_exactly(connection, 32, "server")
    connection.sendall((1 << 20).to_bytes(4, "big") + b"\x00")
    assert connection.recv(1) == b"", "the server hangs up without waiting for the frame"
    connection.close()


def test_an_enrolled_party_cannot_send_more_than_its_message(session: Session) -> None:
    link = call(session.connect(), session.identities["party 0"], "server 0", session.setting.session)
    with contextlib.suppress(ProtocolError):
        link.send(DATA, bytes(1 << 20))
    with pytest.raises((LinkClosed, TamperedMessage)):
        link.receive(DATA)
    assert session.server.messages == {}
