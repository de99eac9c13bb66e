"""Runs a session between processes of the operating system, over loopback sockets.

Every party and every server is a process of its own; the analyst is the calling one. Coins of parties and noise secrets
of servers are drawn inside their processes and never leave them. The session is bounded: at most `LARGEST_SESSION`
parties, a time after which the system ends each process, and no process outlives the `with` block.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lipdp_lightning.curves.releases import CurveRelease
from lipdp_lightning.studies.parties import roles
from lipdp_lightning.studies.parties.costs import ANALYST, Traffic, server_name
from lipdp_lightning.studies.parties.kernel_sums import ThresholdCounts, UStatistic
from lipdp_lightning.studies.parties.one_process import ServerView, choose_opening, make_release, new_session
from lipdp_lightning.studies.parties.roles import Setting, party_name
from lipdp_lightning.studies.parties.secure_aggregation import (
    ENDED,
    IntArray,
    PartyLost,
    ProtocolError,
    SecureAggregation,
    ServerLost,
    Words,
)
from lipdp_lightning.studies.parties.server_noise import noise_scale
from lipdp_lightning.studies.parties.transport import (
    END,
    HOST,
    OPEN,
    SEAL,
    STATUS,
    Link,
    LinkClosed,
    call,
    new_identities,
)

LARGEST_SESSION = 32
_AGAIN = "HINT: run the session again; a new one draws new shares and new noise."


class ProcessSession:
    """Runs a session in `with ProcessSession(...) as session: session.query()`.

    Args:
        protocol, statistic, records, epsilon: as for `run_in_memory`; one record per party.
        charge: called once, when the answers of the first request are all there and before they are put together. A
            session that fails earlier has shown the analyst fewer answers than open the sum, which are uniformly
            distributed whatever the records: nothing is charged for it.
        seconds: the time after which every process ends.
        record_views: whether to fill `views` at the end; for tests.
        party, server: what the processes run.
    """

    def __init__(
        self,
        protocol: SecureAggregation,
        statistic: UStatistic,
        records: npt.ArrayLike,
        epsilon: float,
        *,
        charge: Callable[[CurveRelease], None] = lambda release: None,
        seconds: float = 20.0,
        record_views: bool = False,
        party: Callable[..., None] = roles.run_party,
        server: Callable[..., None] = roles.run_server,
    ) -> None:
        self._rows = statistic.check(records)
        parties = self._rows.shape[0]
        if parties > LARGEST_SESSION or not 1 <= seconds <= 600:
            raise ValueError(
                f"{parties} parties as processes for {seconds} seconds are not started: at most {LARGEST_SESSION} "
                "parties, 1 to 600 seconds.\n"
                "HINT: run_in_memory counts the same bytes for any number of parties."
            )
        noise_scale(statistic.cost, epsilon)  # refuses an epsilon before anything is started
        self.setting = Setting(new_session(), protocol, statistic, epsilon, parties, seconds, record_views)
        self._charge, self._party, self._server = charge, party, server
        self._identities = new_identities(
            [ANALYST, *map(server_name, range(protocol.servers)), *map(party_name, range(parties))]
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([roles.__name__])
        self._processes: dict[str, tuple[Any, Connection]] = {}
        self._links: dict[int, Link] = {}
        self._opening: tuple[int, ...] = ()
        self._asked = self._failed = False
        self._charge_due = True
        self.traffic = Traffic()
        self.views: list[ServerView] = []

    @property
    def process_ids(self) -> dict[str, int]:
        """The ids of the started processes, by name."""
        return {name: process.pid for name, (process, _) in self._processes.items()}

    def __enter__(self) -> ProcessSession:
        try:
            self._start()
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for server, link in list(self._links.items()):
            try:
                link.send(END)
                self.traffic.merge(ANALYST, server_name(server), link.sent)
            except ProtocolError:
                del self._links[server]
        if kind is None:
            for server in self._links:
                self._collect_report(server)
        self._stop(1.0 if kind is None else 0.0)

    def query(self, thresholds: tuple[int, ...] | None = None) -> IntArray:
        """Returns the sum plus the noise of every opening server, at other thresholds if the protocol is `reusable`."""
        setting = self.setting
        free = setting.protocol.reusable and isinstance(setting.statistic, ThresholdCounts)
        if (thresholds is not None and not free) or (self._asked and not setting.protocol.reusable):
            raise ValueError(
                f"{setting.protocol.name} answers once, for what the parties have shared.\n"
                "HINT: start a new session, or use FunctionSharing() or TableSharing(), whose servers answer "
                "any threshold."
            )
        if self._failed:
            raise ServerLost(f"this session failed before. {_AGAIN}")
        self._asked = True
        answers = self._ask(self._request(thresholds))
        if self._charge_due:
            self._charge(make_release(setting.protocol, setting.statistic, setting.epsilon, setting.session))
            self._charge_due = False
        return setting.protocol.combine(self._opening, answers)

    def _ask(self, request: bytes) -> dict[int, Words]:
        answers = {}
        ended = ENDED if self._charge_due else "No further values were released."
        try:
            for server in self._opening:
                self._links[server].send(OPEN, request)
            for server in self._opening:
                answers[server] = roles.read_answer(self._links[server])
        except ProtocolError as error:
            self._failed = True  # what other servers may still send belongs to this request
            kind = ServerLost if isinstance(error, LinkClosed) else type(error)
            raise kind(f"{error} {ended}\n{_AGAIN}") from error
        return answers

    def _request(self, thresholds: tuple[int, ...] | None) -> bytes:
        setting, points = self.setting, b""
        if setting.protocol.reusable and isinstance(setting.statistic, ThresholdCounts):
            statistic = setting.statistic if thresholds is None else setting.statistic.at(thresholds)
            points = np.array(statistic.thresholds, dtype="<i8").tobytes()
        return bytes([len(self._opening), *self._opening]) + points

    def _start(self) -> None:
        setting, servers = self.setting, range(self.setting.protocol.servers)
        for server in servers:
            self._launch(server_name(server), self._server, server)
        ports = tuple(self._port(server) for server in servers)
        for server in servers:
            self._connect(server, ports[server])
        for i in range(setting.parties):
            self._launch(party_name(i), self._party, ports, self._rows[i : i + 1])
        self._wait_for_parties()
        self._opening = choose_opening(setting.protocol, self._seal())

    def _launch(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        mine, theirs = self._context.Pipe()
        everything = (self.setting, self._identities[name], *arguments, theirs)
        process = self._context.Process(target=main, args=everything, daemon=True, name=f"lipdp {name}")
        process.start()
        theirs.close()
        self._processes[name] = process, mine

    def _port(self, server: int) -> int:
        _, pipe = self._processes[server_name(server)]
        try:
            return int(pipe.recv()) if pipe.poll(self.setting.seconds) else 0
        except EOFError:
            return 0

    def _connect(self, server: int, port: int) -> None:
        """Connects to a server; one that cannot be reached is left out, and the opening decides whether enough are
        left.
        """
        try:
            connection = socket.create_connection((HOST, port), timeout=self.setting.link_seconds)
            self._links[server] = call(connection, self._identities[ANALYST], server_name(server), self.setting.session)
        except (OSError, ProtocolError):
            return

    def _wait_for_parties(self) -> None:
        deadline = time.monotonic() + self.setting.seconds * 0.75
        for i in range(self.setting.parties):
            process, pipe = self._processes[party_name(i)]
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            try:
                if process.exitcode == 0 and pipe.poll():
                    for (sender, receiver), count in pipe.recv().links.items():
                        self.traffic.merge(sender, receiver, count)
            except EOFError:
                continue

    def _seal(self) -> list[int]:
        """Returns the servers that have every party's message."""
        setting, available = self.setting, []
        missing: dict[int, list[int]] = {}
        for server, link in sorted(self._links.items()):
            try:
                link.send(SEAL)
                _, bits = link.receive(STATUS, most=-(-setting.parties // 8))
                link.wait_at_most(setting.seconds)  # an answer takes longer than a status
            except ProtocolError:
                continue
            there = np.unpackbits(np.frombuffer(bits, np.uint8), count=setting.parties, bitorder="little")
            lost = np.flatnonzero(there == 0).tolist()
            if lost:
                missing[server] = lost
            else:
                available.append(server)
        if missing and len(available) < setting.protocol.openers:
            names = sorted({i for lost in missing.values() for i in lost})
            raise PartyLost(
                f"the messages of parties {names} did not arrive at servers {sorted(missing)}. {ENDED}\n{_AGAIN}"
            )
        try:
            choose_opening(setting.protocol, available)
        except ServerLost as error:
            raise ServerLost(f"{ENDED} {error}") from error
        return available

    def _collect_report(self, server: int) -> None:
        _, pipe = self._processes[server_name(server)]
        try:
            if not pipe.poll(self.setting.link_seconds):
                return
            traffic, view = pipe.recv()
        except EOFError:
            return
        for (sender, receiver), count in traffic.links.items():
            self.traffic.merge(sender, receiver, count)
        if view is not None:
            self.views.append(view)

    def _stop(self, patience: float) -> None:
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + patience
        for process, pipe in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
