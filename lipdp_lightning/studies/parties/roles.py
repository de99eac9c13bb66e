"""Implements the process of a party and the process of a server."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lipdp_lightning.privacy.keys import new_secret
from lipdp_lightning.studies.parties.costs import ANALYST, PARTIES, WORD_BYTES, Traffic, server_name
from lipdp_lightning.studies.parties.kernel_sums import ThresholdCounts, UStatistic
from lipdp_lightning.studies.parties.one_process import ServerView
from lipdp_lightning.studies.parties.secure_aggregation import (
    IntArray,
    ProtocolError,
    SecureAggregation,
    ShareRandomness,
    Words,
)
from lipdp_lightning.studies.parties.server_noise import NamedNoise, noise_scale
from lipdp_lightning.studies.parties.transport import (
    ANSWER,
    DATA,
    END,
    HOST,
    OPEN,
    RECEIVED,
    REFUSED,
    SEAL,
    STATUS,
    Identity,
    Link,
    LinkClosed,
    answer,
    call,
)

_TICK = 0.05  # seconds between two checks for slow callers


@dataclass(frozen=True)
class Setting:
    """The facts that everyone in a session knows."""

    session: bytes
    protocol: SecureAggregation
    statistic: UStatistic
    epsilon: float
    parties: int
    seconds: float
    record_views: bool = False  # servers hand their views to whoever started them: for tests

    @property
    def link_seconds(self) -> float:
        """The time to wait for a silent link."""
        return self.seconds / 4


def party_name(index: int) -> str:
    return f"party {index}"


def end_after(seconds: float) -> None:
    """Makes the system end this process after that time, whatever it is waiting for."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(1, math.ceil(seconds)))


def deliver(setting: Setting, identity: Identity, server: int, port: int, message: bytes) -> Link:
    """Sends one message to a server and waits until it has it."""
    try:
        connection = socket.create_connection((HOST, port), timeout=setting.link_seconds)
    except OSError as error:
        raise LinkClosed(f"server {server} cannot be reached: {error}.") from error
    connection.settimeout(setting.link_seconds)
    link = call(connection, identity, server_name(server), setting.session)
    link.send(DATA, message)
    link.receive(RECEIVED, most=0)
    link.close()
    return link


def run_party(setting: Setting, identity: Identity, ports: tuple[int, ...], row: IntArray, report: Connection) -> None:
    """Shares one record among the servers; ends normally if enough of them for a release have it."""
    end_after(setting.seconds)
    rows = setting.statistic.check(row)
    shares = setting.protocol.share(setting.statistic, rows, ShareRandomness(new_secret(), setting.session))
    traffic, reached = Traffic(), 0
    for server, port in enumerate(ports):
        try:
            link = deliver(setting, identity, server, port, shares[server][0].tobytes())
        except ProtocolError:
            continue  # the seal will show which servers have it
        reached += 1
        traffic.merge(PARTIES, server_name(server), link.sent)
    report.send(traffic)
    if reached < setting.protocol.openers:
        raise SystemExit(1)


@dataclass
class Server:
    """A server's state. Records are taken until the seal, and answers are given after it."""

    setting: Setting
    identity: Identity
    index: int
    messages: dict[int, bytes] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)
    opening: tuple[int, ...] = ()
    view: ServerView | None = None
    sealed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # callers are answered at the same time

    def __post_init__(self) -> None:
        scale = noise_scale(self.setting.statistic.cost, self.setting.epsilon)
        self._noise = NamedNoise(new_secret(), self.setting.session, scale)
        self._state: Any = None

    def take(self, link: Link) -> None:
        """Takes one party's message.

        A message of another length does not count, and of two that arrived none does: the shares of two tries have
        other coins, and a sum of both would be nonsense.
        """
        index = int(link.peer.partition(" ")[2])
        length = self.setting.protocol.message_bytes(self.index, self.setting.statistic)
        _, message = link.receive(DATA, most=length)
        with self.lock:
            if self.sealed:
                raise LinkClosed(f"{link.peer} came after the seal.")
            accepted = index not in self.heard and len(message) == length
            if accepted:
                self.messages[index] = message
            else:
                self.messages.pop(index, None)
            self.heard.add(index)
        if accepted:
            link.send(RECEIVED)
        with self.lock:
            self.traffic.merge(server_name(self.index), PARTIES, link.sent)
        link.close()

    def seal(self) -> bytes:
        """Returns one bit per party, whether its message is here; no message is taken from now on."""
        with self.lock:
            self.sealed = True
            return self.status()

    def status(self) -> bytes:
        """Returns one bit per party, whether its message is here."""
        there = np.zeros(self.setting.parties, dtype=np.uint8)
        there[list(self.messages)] = 1
        return np.packbits(there, bitorder="little").tobytes()

    def open(self, request: bytes) -> tuple[int, bytes]:
        """Returns the noised share, or why it is not given."""
        opening, thresholds = tuple(request[1 : 1 + request[0]]), request[1 + request[0] :]
        protocol, statistic = self.setting.protocol, self.setting.statistic
        problem = self._refusal(opening)
        if problem:
            return REFUSED, problem.encode()
        if protocol.reusable and isinstance(statistic, ThresholdCounts):
            statistic = statistic.at(tuple(np.frombuffer(thresholds, dtype="<i8").tolist()))
        if self._state is None:
            rows = b"".join(self.messages[i] for i in range(self.setting.parties))
            table = np.frombuffer(rows, dtype=np.uint8).reshape(self.setting.parties, -1)
            self._state = protocol.collect(self.index, statistic, self.setting.session, table)
        noise = statistic.noise(self._noise)
        share = protocol.answer(self.index, statistic, self._state)
        words = protocol.add_noise(self.index, share, noise, opening)
        if self.setting.record_views:
            received = np.stack([np.frombuffer(self.messages[i], np.uint8) for i in range(self.setting.parties)])
            self.view = ServerView(self.index, received, noise, words)
        self.opening = opening
        return ANSWER, words.astype("<u8").tobytes()

    def _refusal(self, opening: tuple[int, ...]) -> str:
        protocol = self.setting.protocol
        if len(self.messages) < self.setting.parties:
            return "messages of some parties are missing: the sum would not be that of all"
        if self.opening and (opening != self.opening or not protocol.reusable):
            return "this session was opened before: another opening would give the noise away"
        members = set(opening)
        right = len(members) == len(opening) == protocol.openers and members <= set(range(protocol.servers))
        if not right or self.index not in members:
            return f"{opening} is not an opening set of this protocol that this server belongs to"
        return ""


def run_server(setting: Setting, identity: Identity, index: int, report: Connection) -> None:
    """Listens on a free port, which is reported, takes the parties' messages, and answers the analyst until its end."""
    end_after(setting.seconds)
    server = Server(setting, identity, index)
    with socket.create_server((HOST, 0), backlog=setting.parties + 8) as listener:
        report.send(listener.getsockname()[1])
        try:
            analyst = collect_messages(server, listener)
            serve_analyst(server, analyst)
        except ProtocolError:
            raise SystemExit(1) from None  # the analyst is gone, or is not the analyst: no answer is given
    server.traffic.merge(server_name(index), ANALYST, analyst.sent)
    report.send((server.traffic, server.view))


def collect_messages(server: Server, listener: socket.socket) -> Link:
    """Takes calls until the analyst seals the session, which must happen in time.

    Every caller is answered by a thread of its own and has `link_seconds` for its whole message, so that one who is
    silent, slow or sends nonsense delays nobody else. If there are more callers than a session can have, the oldest is
    dropped.
    """
    setting, callers = server.setting, _Callers(server)
    deadline = time.monotonic() + setting.seconds
    try:
        while time.monotonic() < deadline:
            waiting: list[socket.socket | Link] = [listener] if callers.analyst is None else [listener, callers.analyst]
            ready, _, _ = select.select(waiting, [], [], _TICK)
            if callers.analyst is not None and callers.analyst in ready:
                callers.analyst.receive(SEAL, most=0)
                callers.analyst.send(STATUS, server.seal())
                return callers.analyst
            if listener in ready:
                connection, _ = listener.accept()
                callers.answer(connection)
            callers.turn_away()
    finally:
        callers.turn_away(everyone=True)
    raise LinkClosed("the analyst did not seal the session in time.")


class _Callers:
    """Connections that are being answered, and the analyst once it has shown who it is."""

    def __init__(self, server: Server) -> None:
        self.analyst: Link | None = None
        self._server, self._lock = server, threading.Lock()
        self._most = 4 * server.setting.parties + 16  # more than that is no session of this kind
        self._since: dict[socket.socket, float] = {}

    def answer(self, connection: socket.socket) -> None:
        connection.settimeout(self._server.setting.link_seconds)
        with self._lock:
            self._since[connection] = time.monotonic()
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        setting = self._server.setting
        try:
            link = answer(connection, self._server.identity, setting.session)
            if link.peer == ANALYST:
                with self._lock:
                    first = self.analyst is None
                    if first:
                        self._since.pop(connection, None)  # the analyst is not ended for being slow
                        connection.settimeout(setting.seconds)
                        self.analyst = link
                if not first:
                    connection.close()
            elif link.peer.startswith("party"):
                self._server.take(link)
        except (ProtocolError, OSError):
            connection.close()  # a caller that broke off, or lied about who it is: its message does not count
        finally:
            with self._lock:
                self._since.pop(connection, None)

    def turn_away(self, everyone: bool = False) -> None:
        """Ends the connections whose time is over, and the oldest ones if there are too many."""
        with self._lock:
            late = time.monotonic() - self._server.setting.link_seconds
            surplus = len(self._since) - self._most
            for number, (connection, since) in enumerate(list(self._since.items())):
                if everyone or number < surplus or since < late:
                    del self._since[connection]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread of this connection, which closes it


def serve_analyst(server: Server, analyst: Link) -> None:
    """Answers requests until the analyst ends the session."""
    while True:
        kind, request = analyst.receive(OPEN, END)
        if kind == END:
            analyst.close()
            return
        analyst.send(*server.open(request))


def read_answer(link: Link) -> Words:
    """Returns a server's answer on the analyst's side; raises ProtocolError if it refused."""
    kind, payload = link.receive(ANSWER, REFUSED)
    if kind == REFUSED or len(payload) % WORD_BYTES:
        raise ProtocolError(f"{link.peer} refused: {payload.decode(errors='replace')}.")
    return np.frombuffer(payload, dtype="<u8").astype(np.uint64)
