"""Counts bytes on every link where they are sent, and holds the cost model of 004, section 6.4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from lipdp_lightning.studies.parties.kernel_sums import UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import SecureAggregation

HEADER_BYTES = 5  # length and kind of a frame
TAG_BYTES = 16  # authentication of a frame
HELLO_BYTES = 6 + 32  # who calls, and an ephemeral key
REPLY_BYTES = 32  # the answering ephemeral key
THRESHOLD_BYTES = 8
WORD_BYTES = 8
ANALYST = "analyst"
PARTIES = "parties"


@dataclass
class LinkCount:
    """The bytes that one side sent to the other on one link, or on several links of the same kind."""

    messages: int = 0
    payload: int = 0  # plain text of the messages
    framing: int = 0  # headers and tags
    handshake: int = 0

    @property
    def protocol(self) -> int:
        """The bytes sent after the handshake."""
        return self.payload + self.framing

    @property
    def total(self) -> int:
        return self.protocol + self.handshake

    def add(self, other: LinkCount) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def frames(self, count: int, payload_each: int) -> None:
        self.messages += count
        self.payload += count * payload_each
        self.framing += count * (HEADER_BYTES + TAG_BYTES)


@dataclass
class Traffic:
    """The counts per (sender, receiver); the parties are one sender."""

    links: dict[tuple[str, str], LinkCount] = field(default_factory=dict)

    def link(self, sender: str, receiver: str) -> LinkCount:
        return self.links.setdefault((sender, receiver), LinkCount())

    def merge(self, sender: str, receiver: str, count: LinkCount) -> None:
        self.link(sender, receiver).add(count)

    def between(self, senders: Iterable[str], receivers: Iterable[str]) -> LinkCount:
        total = LinkCount()
        wanted = set(senders), set(receivers)
        for (sender, receiver), count in self.links.items():
            if sender in wanted[0] and receiver in wanted[1]:
                total.add(count)
        return total

    @property
    def protocol(self) -> int:
        return sum(count.protocol for count in self.links.values())

    @property
    def handshake(self) -> int:
        return sum(count.handshake for count in self.links.values())

    @property
    def total(self) -> int:
        return self.protocol + self.handshake


def server_name(index: int) -> str:
    return f"server {index}"


def open_bytes(protocol: SecureAggregation, queried: int) -> int:
    """Returns the payload of the analyst's request: the opening set, and the thresholds if they are free."""
    return 1 + protocol.openers + THRESHOLD_BYTES * queried * protocol.reusable


def count_session(protocol: SecureAggregation, statistic: UStatistic, parties: int, asked: int) -> Traffic:
    """Returns the traffic of a session with one request of `asked` thresholds (0 if the statistic has none).

    Lengths depend on public numbers only. A test compares them with the sockets of a session between processes.
    """
    traffic = Traffic()
    confirmation = 1  # each side's first frame is empty: it shows that the keys agree
    for server in range(protocol.servers):
        name = server_name(server)
        up, down = traffic.link(PARTIES, name), traffic.link(name, PARTIES)
        up.handshake += parties * (HELLO_BYTES + HEADER_BYTES + TAG_BYTES)
        down.handshake += parties * (REPLY_BYTES + HEADER_BYTES + TAG_BYTES)
        up.frames(parties, protocol.message_bytes(server, statistic))
        down.frames(parties, 0)
        to, back = traffic.link(ANALYST, name), traffic.link(name, ANALYST)
        to.handshake += HELLO_BYTES + confirmation * (HEADER_BYTES + TAG_BYTES)
        back.handshake += REPLY_BYTES + confirmation * (HEADER_BYTES + TAG_BYTES)
        to.frames(1, 0)  # are all parties in?
        back.frames(1, (parties + 7) // 8)
        to.frames(1, 0)  # the end
        if server < protocol.openers:
            to.frames(1, open_bytes(protocol, asked))
            back.frames(1, WORD_BYTES * statistic.length)
    return traffic


def modelled_bits(
    parties: int, servers: int, thresholds: int, message_bits: int, word_bits: int = 64
) -> dict[str, int]:
    """Returns the leading terms of section 6.4, in bits: every key and every threshold's question and answer, or every
    round.
    """
    return {
        "fss": servers * (parties * message_bits + thresholds * 2 * word_bits),
        "secure aggregation": thresholds * parties * word_bits,
    }
