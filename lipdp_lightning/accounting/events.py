"""The entries of a ledger: releases with Gaussian noise, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

SUBSAMPLED_GAUSSIAN = "subsampled_gaussian"
GAUSSIAN = "gaussian"

# a year has 3e7 seconds; up to this number, values for each step, or each step of an epoch, fit into memory
MOST_STEPS = 10**9
MOST_ROWS = 10**15
# products and quotients of constants are formed in float32, whose range is 1e-38 to 3e38
SMALLEST, LARGEST = 1e-30, 1e30
SMALLEST_DELTA = 1e-300
SMALLEST_EPSILON = 1e-9


@dataclass(frozen=True)
class LedgerEntry:
    """`count` releases of one mechanism, whose sensitivity to adding or removing one example is 1 in the l2 norm.

    A ledger is a sequence of entries. The ledger of a run is `plan.events(branches.spent(step))`: the statistics
    released before the first step, and the steps of all branches of the run.

    `subsampled_gaussian`: each example is in the sum with probability ``sample_rate``, independently and afresh each
    time. `gaussian`: every example is in it. A noise multiplier of 0 spends everything. The label is for readers.

    Example:
        >>> LedgerEntry("subsampled_gaussian", noise_multiplier=1.1, sample_rate=256 / 60000, count=14062)
    """

    MECHANISMS: ClassVar[tuple[str, ...]] = (SUBSAMPLED_GAUSSIAN, GAUSSIAN)
    OF_ALL_EXAMPLES: ClassVar[tuple[str, ...]] = (GAUSSIAN,)

    mechanism: str
    noise_multiplier: float
    sample_rate: float
    count: int
    label: str = ""

    def __post_init__(self) -> None:
        problems = []
        if self.mechanism not in self.MECHANISMS:
            problems.append(f"mechanism {self.mechanism!r} is not one of {', '.join(self.MECHANISMS)}.")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            problems.append(f"noise_multiplier {self.noise_multiplier} is not a finite number >= 0.")
        if not 0 < self.sample_rate <= 1:
            problems.append(f"sample_rate {self.sample_rate} is not in (0, 1].")
        if self.mechanism in self.OF_ALL_EXAMPLES and self.sample_rate != 1:
            problems.append(f"a {self.mechanism!r} entry uses every example, but sample_rate is {self.sample_rate}.")
        if self.count < 0 or int(self.count) != self.count:
            problems.append(f"count {self.count} is not a number of releases.")
        if problems:
            made = f"{type(self).__name__}({self.MECHANISMS[0]!r}, noise_multiplier=1.1, sample_rate=0.004, count=1)"
            hint = f"HINT: use {made}"
            raise ValueError("\n".join([*problems, hint]))


def join_noise_multipliers(noise_multipliers: Iterable[float]) -> float:
    """Returns the noise multiplier of several Gaussian queries on the SAME Poisson sample: 1/sqrt(sum 1/s^2).

    One sample is drawn, so an example is in all the queries or in none: the step is ONE subsampled Gaussian of
    this multiplier. Separate entries would pretend that there are as many independent samples, and report less than
    is spent.

    Raises:
        ValueError: if there is no multiplier, or one is negative or NaN.
    """
    values = list(noise_multipliers)
    if not values or any(math.isnan(s) or s < 0 for s in values):
        raise ValueError(
            f"noise multipliers {values} cannot be joined: at least one is needed, none negative.\n"
            "HINT: pass the multiplier of every query made on the sample."
        )
    if any(s == 0 for s in values):
        return 0.0
    inverse = math.fsum(1.0 / s**2 for s in values)
    return math.inf if inverse == 0 else 1.0 / math.sqrt(inverse)


def size_problems(dataset_size: int, batch_size: float, steps: int) -> Iterator[tuple[str, str]]:
    """Yields problem and hint for positive sizes that no training needs and no machine has memory for."""
    if steps > MOST_STEPS:
        yield f"steps {_number(steps)} is more than any training takes ({MOST_STEPS:.0e}).", "fewer steps or epochs."
    if dataset_size > MOST_ROWS:
        yield f"dataset_size {_number(dataset_size)} is more rows than there are ({MOST_ROWS:.0e}).", "declare it."
    if batch_size * MOST_STEPS < dataset_size:
        yield f"expected_batch_size {batch_size} is so small that steps would draw nothing.", "256, for example."


def _number(count: int) -> str:
    return str(count) if count < 10**15 else f"of {len(str(count))} digits"


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and not a truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # the whole number is too large for a float
        return False


def is_positive(value: Any) -> bool:
    """Returns whether a value is a positive, finite number."""
    return is_number(value) and value > 0
