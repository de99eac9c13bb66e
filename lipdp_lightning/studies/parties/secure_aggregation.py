"""Defines secure aggregation: the operation UStat of 004, section 6.2.1, and what can go wrong in it.

One protocol has parties (one record each), servers (one message from every party each) and an analyst (one answer from
every opening server). Adversary: semi-honest, that is, everyone follows the protocol and tries to learn from what it
sees; up to `coalition` servers, together with the analyst and any number of parties, may pool their views.

It is proven (docs/parties.md) that a server's view is independent of the honest parties' records, and that the view of
a coalition with the analyst is a randomised function of (sum + noise of one server outside the coalition) and of the
coalition's own inputs. Hence it is epsilon-DP, because every server alone adds enough noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.studies.parties.kernel_sums import UStatistic

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]

ENDED = "Nothing was released and no budget was charged."


class ProtocolError(ValueError):
    """The protocol ended before the release."""


class PartyLost(ProtocolError):
    """A party's record did not reach all servers."""


class ServerLost(ProtocolError):
    """Too few servers are left to answer."""


class TamperedMessage(ProtocolError):
    """A message was changed, replayed, reordered or cut, or came from someone else."""


class ShareRandomness:
    """The coins of one party in one session, to be taken once.

    Coins used for two records reveal their difference (shares of both are known up to the same mask), so a second
    `stream` is refused; another session has other coins.
    """

    def __init__(self, secret: bytes, session: bytes) -> None:
        self.session = session
        self._key = derive_key(secret, "party shares", session)
        self._taken = False

    def stream(self) -> CounterStream:
        if self._taken:
            raise ValueError(
                "the randomness of this session was used for another record: two records masked by the same coins "
                "give away their difference.\nHINT: make ShareRandomness(new_secret(), session) for every record."
            )
        self._taken = True
        return CounterStream(self._key)


class SecureAggregation(ABC):
    """A way to publish a noised sum. Methods are vectorised: a row per party, whichever process runs them."""

    name: ClassVar[str]
    reusable: ClassVar[bool] = False  # other thresholds may be asked without the parties
    servers: int

    @property
    def coalition(self) -> int:
        """The largest number of servers that together learn nothing more than the noised sum."""
        return self.servers - 1

    @property
    def openers(self) -> int:
        """The number of servers that answer; a release has the noise of each."""
        return self.servers

    @abstractmethod
    def message_bytes(self, server: int, statistic: UStatistic) -> int:
        """Returns the length of every party's message to a server, which does not depend on the record."""

    @abstractmethod
    def share(self, statistic: UStatistic, records: IntArray, randomness: ShareRandomness) -> list[Bytes]:
        """Returns per server an array (parties, message_bytes)."""

    @abstractmethod
    def collect(self, server: int, statistic: UStatistic, session: bytes, messages: Bytes) -> Any:
        """Returns what a server keeps of the messages."""

    @abstractmethod
    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        """Returns a server's share of the sum without noise, which does not leave the server."""

    def add_noise(self, server: int, answer: Words, noise: IntArray, opening: Sequence[int]) -> Words:
        """Returns a server's share of the sum plus its noise, which is sent to the analyst."""
        return answer + noise.astype(np.uint64)

    def combine(self, opening: Sequence[int], answers: Mapping[int, Words]) -> IntArray:
        """Returns the sum and the noises of all opening servers, from their answers."""
        total = np.stack([answers[server] for server in opening]).sum(axis=0, dtype=np.uint64)
        return np.asarray(total, dtype=np.uint64).astype(np.int64)


def as_rows(words: Words) -> Bytes:
    """Returns 64-bit words (parties, k) as the bytes (parties, 8 k) of the messages, little-endian."""
    return np.ascontiguousarray(words, dtype="<u8").view(np.uint8).reshape(words.shape[0], -1)


def as_words(messages: Bytes) -> Words:
    """Inverts `as_rows`."""
    return np.ascontiguousarray(messages).view("<u8").astype(np.uint64)
