"""What was released, in order, as a run-length encoded list of mechanisms (docs/guarantee.md, accounting)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SUBSAMPLED_GAUSSIAN = "subsampled_gaussian"
GAUSSIAN = "gaussian"
MECHANISMS = (SUBSAMPLED_GAUSSIAN, GAUSSIAN)
_FORMAT_VERSION = 1

# a year has 3e7 seconds; what is worked out for each step, or each step of an epoch, stays within memory
MOST_STEPS = 10**9
MOST_ROWS = 10**15
# constants enter products and quotients in float32, whose range is 1e-38 to 3e38
SMALLEST, LARGEST = 1e-30, 1e30
SMALLEST_DELTA = 1e-300
SMALLEST_EPSILON = 1e-9


def join_noise_multipliers(noise_multipliers: Iterable[float]) -> float:
    """Noise multiplier of several Gaussian queries answered on the SAME Poisson sample: 1/sqrt(sum 1/s^2).

    One sample is drawn, so an example is in all the queries or in none: the step is ONE subsampled Gaussian of
    this multiplier. Booking the queries as separate events would pretend to as many independent samples, and
    reports less than is spent.
    """
    values = list(noise_multipliers)
    wrong = [s for s in values if math.isnan(s) or s < 0]
    if wrong or not values:
        raise ValueError(
            f"noise multipliers {values} cannot be joined: at least one is needed, none negative.\n"
            "HINT: pass the multiplier of every query made on the sample."
        )
    if any(s == 0 for s in values):
        return 0.0
    inverse_square = math.fsum((1.0 / s) ** 2 for s in values)
    return math.inf if inverse_square == 0 else 1.0 / math.sqrt(inverse_square)


@dataclass(frozen=True)
class LedgerEntry:
    """`count` consecutive releases of one mechanism, its L2 sensitivity 1 for adding or removing one example.

    `subsampled_gaussian`: each example is in the sum with probability sample_rate, independently and afresh
    for each release. `gaussian`: every example is in it. A noise multiplier of 0 spends everything.
    """

    mechanism: str
    noise_multiplier: float
    sample_rate: float
    count: int
    label: str = ""

    def __post_init__(self) -> None:
        problems = []
        if self.mechanism not in MECHANISMS:
            problems.append(f"mechanism {self.mechanism!r} is not one of {', '.join(MECHANISMS)}.")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            problems.append(f"noise_multiplier {self.noise_multiplier} is not a finite number >= 0.")
        if not 0 < self.sample_rate <= 1:
            problems.append(f"sample_rate {self.sample_rate} is not in (0, 1].")
        if self.mechanism == GAUSSIAN and self.sample_rate != 1:
            problems.append(f"a 'gaussian' entry uses every example, but sample_rate is {self.sample_rate}.")
        if self.count < 0 or int(self.count) != self.count:
            problems.append(f"count {self.count} is not a number of releases.")
        if problems:
            hint = f"HINT: LedgerEntry({SUBSAMPLED_GAUSSIAN!r}, noise_multiplier=1.1, sample_rate=0.004, count=1)"
            raise ValueError("\n".join([*problems, hint]))

    def same_mechanism(self, other: LedgerEntry) -> bool:
        """Equal in everything but the count."""
        return dataclasses.replace(self, count=other.count) == other


class Ledger:
    """Append-only list of releases; equal consecutive entries merge, so a run is a line or two."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self._entries: list[LedgerEntry] = []
        for entry in entries:
            self.record(entry)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries)

    @property
    def total_steps(self) -> int:
        return sum(entry.count for entry in self._entries)

    def record(self, entry: LedgerEntry) -> None:
        """Append a release. There is deliberately no way to take one back."""
        if entry.count == 0:
            return
        if self._entries and self._entries[-1].same_mechanism(entry):
            last = self._entries[-1]
            self._entries[-1] = dataclasses.replace(last, count=last.count + entry.count)
        else:
            self._entries.append(entry)

    def to_json(self) -> str:
        rows = [dataclasses.asdict(entry) for entry in self._entries]
        return json.dumps({"version": _FORMAT_VERSION, "entries": rows}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Inverse of `to_json`; refuses anything it does not fully understand, rather than lose a release."""
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("version") != _FORMAT_VERSION:
            raise ValueError(
                f"not a ledger of version {_FORMAT_VERSION}: entries it holds could be missed.\n"
                "HINT: read it with the release of lipdp-lightning that wrote it."
            )
        try:
            return cls(LedgerEntry(**row) for row in content["entries"])
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"the ledger is damaged: {error}.\nHINT: restore the file from the run's checkpoint."
            ) from error

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Ledger({self._entries!r})"


def size_problems(dataset_size: int, batch_size: float, steps: int) -> Iterator[tuple[str, str]]:
    """Yields problem and hint for sizes that no training needs and no machine has room for.

    Args:
        dataset_size: the declared number of rows, positive.
        batch_size: the expected number of rows in a step, positive.
        steps: the planned number of steps, positive.
    """
    if steps > MOST_STEPS:
        yield f"steps {_number(steps)} is more than any training takes ({MOST_STEPS:.0e}).", "fewer steps or epochs."
    if dataset_size > MOST_ROWS:
        yield f"dataset_size {_number(dataset_size)} is more rows than there are ({MOST_ROWS:.0e}).", "declare it."
    if batch_size * MOST_STEPS < dataset_size:
        yield f"expected_batch_size {batch_size} is so small that steps would draw nothing.", "256, for example."


def _number(count: int) -> str:
    return str(count) if count < 10**15 else f"of {len(str(count))} digits"
