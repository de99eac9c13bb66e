"""Implements additive secret sharing modulo 2^64 (004, section 4.2.1), in which any servers - 1 shares are uniform."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.keys import SECRET_BYTES, derive_key
from lipdp_lightning.studies.parties.kernel_sums import ThresholdCounts, UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import (
    Bytes,
    IntArray,
    SecureAggregation,
    ShareRandomness,
    Words,
    as_rows,
    as_words,
)


def split(values: Words, servers: int, stream: CounterStream) -> Words:
    """Returns shares (servers, *shape) that sum to the values modulo 2^64; all but the last are uniform."""
    masks = stream.uint64((servers - 1) * values.size).reshape(servers - 1, *values.shape)
    return np.concatenate([masks, (values - masks.sum(axis=0, dtype=np.uint64))[None]])


def expand(seeds: Bytes, length: int) -> Words:
    """Returns a row of uniform words per seed (rows of 16 bytes)."""
    keys = (derive_key(seed.tobytes(), "additive share") for seed in seeds)
    return np.stack([CounterStream(key).uint64(length) for key in keys])


def check_servers(name: str, servers: int) -> None:
    if not 2 <= servers <= 64:
        raise ValueError(
            f"{name} among {servers} servers is not offered.\n"
            "HINT: use 2 to 64 servers; a single one that sees everything is TrustedCurator()."
        )


class AdditiveSharing(SecureAggregation):
    """Splits every party's vector phi(record) among all servers, which add up what they get.

    Args:
        servers: the number of servers; all but one may pool their views.
        seeded: whether all but the last server get a seed of 16 bytes instead of a share; the last one's message has
            the length of the vector. The shares are then pseudo-random (AES-256) instead of taken from the party's
            stream.
    """

    name: ClassVar[str] = "additive"

    def __init__(self, servers: int = 2, *, seeded: bool = False) -> None:
        check_servers("additive sharing", servers)
        self.servers, self.seeded = servers, seeded

    def vectors(self, statistic: UStatistic, records: IntArray) -> Words:
        """Returns the vectors that are shared."""
        return statistic.contributions(records).astype(np.uint64)

    def vector_length(self, statistic: UStatistic) -> int:
        return statistic.length

    def _is_seed(self, server: int) -> bool:
        return self.seeded and server < self.servers - 1

    def message_bytes(self, server: int, statistic: UStatistic) -> int:
        return SECRET_BYTES if self._is_seed(server) else 8 * self.vector_length(statistic)

    def share(self, statistic: UStatistic, records: IntArray, randomness: ShareRandomness) -> list[Bytes]:
        values = self.vectors(statistic, records)
        stream = randomness.stream()
        if not self.seeded:
            return [as_rows(share) for share in split(values, self.servers, stream)]
        size = (self.servers - 1, values.shape[0], SECRET_BYTES)
        seeds = np.frombuffer(stream.bytes(int(np.prod(size))), dtype=np.uint8).reshape(size)
        for server in range(self.servers - 1):
            values = values - expand(seeds[server], values.shape[1])
        return [*seeds, as_rows(values)]

    def collect(self, server: int, statistic: UStatistic, session: bytes, messages: Bytes) -> Any:
        shares = expand(messages, self.vector_length(statistic)) if self._is_seed(server) else as_words(messages)
        return shares.sum(axis=0, dtype=np.uint64)

    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        return np.asarray(state, dtype=np.uint64)


class TableSharing(AdditiveSharing):
    """Shares the whole function t -> weight 1[t < x] as its table of 2^levels values, among any number of servers.

    It is function secret sharing without its compression, except for the seeds: all but one server get 16 bytes. After
    one message per party the servers answer any threshold, as with `FunctionSharing`.
    """

    name: ClassVar[str] = "table"
    reusable: ClassVar[bool] = True

    def __init__(self, servers: int = 2) -> None:
        super().__init__(servers, seeded=True)

    def vector_length(self, statistic: UStatistic) -> int:
        return 1 << statistic.levels if isinstance(statistic, ThresholdCounts) else statistic.length

    def vectors(self, statistic: UStatistic, records: IntArray) -> Words:
        if isinstance(statistic, ThresholdCounts):
            if statistic.levels > 16:
                raise ValueError(
                    f"a table of 2^{statistic.levels} values per party is too large.\n"
                    "HINT: use at most 16 levels, or FunctionSharing(), whose keys grow with the levels only."
                )
            statistic = statistic.at(tuple(range(1 << statistic.levels)))
        return super().vectors(statistic, records)

    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        table: Words = np.asarray(state, dtype=np.uint64)
        return table[list(statistic.thresholds)] if isinstance(statistic, ThresholdCounts) else table
