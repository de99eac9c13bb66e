"""Shares functions secretly between two servers (004, section 6.4.2); every party speaks once and is not
needed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lipdp_lightning.studies.parties.function_keys import (
    KeyBatch,
    evaluate,
    from_bytes,
    generate,
    key_bytes,
    sum_everywhere,
    to_bytes,
)
from lipdp_lightning.studies.parties.ggm import FixedKeyGenerator
from lipdp_lightning.studies.parties.kernel_sums import Histogram, ThresholdCounts, UStatistic
from lipdp_lightning.studies.parties.secure_aggregation import (
    Bytes,
    IntArray,
    SecureAggregation,
    ShareRandomness,
    Words,
)


@dataclass(frozen=True)
class _Collected:
    generator: FixedKeyGenerator
    keys: KeyBatch


class FunctionSharing(SecureAggregation):
    """Shares threshold counts by keys of t -> weight 1[t < x], and histograms by keys of t -> 1[t = x].

    A party's message is one key, of O(levels) bytes; afterwards the two servers answer any threshold. The two must not
    collude, since together their keys reveal every record.
    """

    name: ClassVar[str] = "fss"
    reusable: ClassVar[bool] = True
    servers = 2

    def message_bytes(self, server: int, statistic: UStatistic) -> int:
        return key_bytes(*_kind(statistic))

    def share(self, statistic: UStatistic, records: IntArray, randomness: ShareRandomness) -> list[Bytes]:
        levels, comparison = _kind(statistic)
        alphas = records[:, 0].astype(np.uint64)
        betas = records[:, 1].astype(np.uint64) if comparison else np.ones(alphas.size, dtype=np.uint64)
        generator = FixedKeyGenerator(randomness.session)
        pair = generate(generator, alphas, betas, levels, comparison, randomness.stream())
        return [to_bytes(keys) for keys in pair]

    def collect(self, server: int, statistic: UStatistic, session: bytes, messages: Bytes) -> Any:
        return _Collected(FixedKeyGenerator(session), from_bytes(messages, *_kind(statistic)))

    def answer(self, server: int, statistic: UStatistic, state: Any) -> Words:
        if not isinstance(statistic, ThresholdCounts):
            return sum_everywhere(state.generator, server, state.keys)
        at = [evaluate(state.generator, server, state.keys, t).sum(dtype=np.uint64) for t in statistic.thresholds]
        return np.array(at, dtype=np.uint64)


def _kind(statistic: UStatistic) -> tuple[int, bool]:
    if isinstance(statistic, ThresholdCounts):
        return statistic.levels, True
    if isinstance(statistic, Histogram):
        return statistic.levels, False
    raise ValueError(
        f"{type(statistic).__name__} is not a sum of comparison or point functions.\n"
        "HINT: AdditiveSharing or ShamirSharing sum any integer vectors."
    )
