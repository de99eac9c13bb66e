"""Implements the trusted curator: one server sees every record in the clear and adds the noise."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from lipdp_lightning.studies.parties.kernel_sums import UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import (
    Bytes,
    IntArray,
    SecureAggregation,
    ShareRandomness,
    Words,
    as_rows,
    as_words,
)


class TrustedCurator(SecureAggregation):
    """Central differential privacy, the baseline of the others, with the least noise and all the trust."""

    name: ClassVar[str] = "curator"
    reusable: ClassVar[bool] = True
    servers = 1

    def message_bytes(self, server: int, statistic: UStatistic) -> int:
        return 8 * statistic.fields

    def share(self, statistic: UStatistic, records: IntArray, randomness: ShareRandomness) -> list[Bytes]:
        return [as_rows(records.astype(np.uint64))]

    def collect(self, server: int, statistic: UStatistic, session: bytes, messages: Bytes) -> Any:
        return as_words(messages).astype(np.int64)

    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        total: Words = statistic.contributions(state).sum(axis=0).astype(np.uint64)
        return total
