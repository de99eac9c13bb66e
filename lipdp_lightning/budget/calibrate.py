"""Noise for a budget: the inverse of the accountants.

The accountant itself always checks the result: its certified epsilon is at most the target. Another accountant
checks the answer, and a warning gives both numbers if they differ by over 1 %.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from lipdp_lightning.accounting.accountants import (
    ADD_REMOVE,
    AccountantFallbackWarning,
    PrivacyBound,
    answer_by,
    epsilon_of,
)
from lipdp_lightning.accounting.events import SMALLEST_EPSILON, SUBSAMPLED_GAUSSIAN, LedgerEntry
from lipdp_lightning.accounting.privacy_curves import collect
from lipdp_lightning.bound_text import upper_text

TOLERANCE = 1e-3
SMALLEST_NOISE = 0.05
LARGEST_NOISE = 1e6
NOTICEABLE = 0.01  # the largest relative difference of two accountants' epsilons that causes no warning


class AccountantDisagreementWarning(UserWarning):
    """Warns that two accountants' epsilons for the same releases differ by more than a hundredth."""


def steps_for_epochs(epochs: float, dataset_size: int, expected_batch_size: float) -> int:
    """Returns ceil(epochs / sample_rate), the least number of steps with ``epochs`` draws of each row on average."""
    exact = Fraction(epochs) * dataset_size / Fraction(expected_batch_size)
    # the float 0.1 exceeds a tenth: without this tolerance, 0.1 epochs of 100 steps would be 11 steps
    return max(1, math.ceil(exact - Fraction(1, 10**9)))


def privacy_bound(
    noise_multiplier: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
    preliminary: Sequence[LedgerEntry] = (),
) -> PrivacyBound:
    """Returns the bound of ``steps`` subsampled Gaussian steps together with releases before them."""
    entries = [*preliminary, LedgerEntry(SUBSAMPLED_GAUSSIAN, noise_multiplier, sample_rate, steps)]
    return epsilon_of(accountant, entries, delta, adjacency, max_examples_per_unit)


def calibrate_noise(
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
    tolerance: float = TOLERANCE,
    preliminary: Sequence[LedgerEntry] = (),
) -> tuple[float, PrivacyBound]:
    """Returns a noise multiplier whose certified epsilon is at most ``epsilon``, and the bound there.

    It is within ``tolerance`` of the smallest such multiplier. For a step that also answers other queries on its
    sample, it is the JOINED multiplier of the step. Epsilon covers ``preliminary`` and the steps together.

    Raises:
        ValueError: if no noise meets the target, or any noise does.
    """
    check_target(epsilon, tolerance, delta, sample_rate)

    def search_with(name: str, target: float, start: float) -> Search:
        def bound(x: float) -> PrivacyBound:
            noise = math.exp(x)
            return privacy_bound(noise, delta, sample_rate, steps, name, adjacency, max_examples_per_unit, preliminary)

        return Search(bound, target, (math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)), start)

    start = math.log(_first_guess(epsilon, delta, sample_rate, steps))
    if accountant == "prv" and adjacency == ADD_REMOVE:
        # the fast accountant finds the neighbourhood, and PRV decides
        order = max_examples_per_unit
        error = order * min(0.0102, 0.0052 * epsilon / order)
        quick = search_with("pld", epsilon - error, start).run(0.25 * tolerance)
        start = start if math.isnan(quick) else quick
    search = search_with(accountant, epsilon, start)
    log_noise = search.run(0.9 * tolerance)
    if search.unreachable:
        raise ValueError(
            f"epsilon {epsilon} at delta {delta} is out of reach of the {accountant} accountant: {steps} steps at "
            f"sample rate {sample_rate:.3g} spend more even with noise multiplier {LARGEST_NOISE:.0e}"
            f"{' next to the statistics released before them' if preliminary else ''}.\n"
            f"HINT: choose {'more noise for the statistics, ' if preliminary else ''}a larger epsilon or delta, fewer "
            "steps, or another accountant."
        )
    if math.isnan(log_noise):
        raise ValueError(
            f"epsilon {epsilon} at delta {delta} asks for no noise (multiplier {SMALLEST_NOISE} already meets it): "
            "delta forgives publishing every example that is drawn, or epsilon protects nothing.\n"
            "HINT: use a delta below 1/N and epsilon of about 1 to 10."
        )
    noise, bound = math.exp(log_noise), search.answer(log_noise)
    entries = [*preliminary, LedgerEntry(SUBSAMPLED_GAUSSIAN, noise, sample_rate, steps)]
    warn_of_disagreement(bound, entries, delta, adjacency, max_examples_per_unit)
    return noise, bound


def _first_guess(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Returns a guess by the central limit theorem: a Gaussian of mu = q sqrt(T (exp(1/s^2) - 1))."""
    tail = math.sqrt(2 * math.log(1 / delta))
    mu = math.sqrt(tail**2 + 2 * epsilon) - tail
    guess = 1 / math.sqrt(math.log1p(mu**2 / (sample_rate**2 * steps)))
    return min(max(guess, 2 * SMALLEST_NOISE), LARGEST_NOISE / 2)


class Search:
    """Finds the x where a decreasing bound(x).epsilon meets the target: the end of a bracket at which it is met.

    It takes secant steps on log epsilon, which is nearly linear in x, each a little past the root so that both
    ends close in, and bisects if that does not converge.
    """

    def __init__(
        self, bound: Callable[[float], PrivacyBound], target: float, limits: tuple[float, float], start: float
    ) -> None:
        self._bound, self._target, self._limits, self._start = bound, target, limits, start
        self._bounds: dict[float, PrivacyBound] = {}
        self._messages: dict[float, list[str]] = {}
        self.unreachable = False

    def run(self, width: float) -> float:
        """Returns the end; NaN if the target is met at the lower limit, or (`unreachable`) not at the upper one."""
        low, high = -math.inf, math.inf  # the target is met at high, and not at low
        x, slope, previous = self._start, -1.2, (math.nan, math.nan)
        for attempt in range(100):
            excess = self._excess(x)
            low, high = (max(low, x), high) if excess > 0 else (low, min(high, x))
            if low == self._limits[1]:
                self.unreachable = True
                return math.nan
            if high == self._limits[0]:
                return math.nan
            if high - low <= width:
                break
            if abs(x - previous[0]) > 1e-9:
                slope = min(max((excess - previous[1]) / (x - previous[0]), -20.0), -0.2)
            previous = (x, excess)
            side = 1.0 if excess > 0 else -1.0
            distance = abs(excess / slope)
            # the step ends a little past the root, and no further than closes the bracket
            move = side * (0.9 * width if distance < 0.85 * width else distance + 0.4 * width)
            x = min(max(x + min(max(move, -2.0), 2.0), self._limits[0]), self._limits[1])
            if not low < x < high or (attempt > 8 and high - low < math.inf):
                x = (low + high) / 2
        return high

    def _excess(self, x: float) -> float:
        """Returns log(epsilon / target), which is positive if too much is spent."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AccountantFallbackWarning)
            self._bounds[x] = self._bound(x)
        epsilon = self._bounds[x].epsilon
        texts = [str(w.message) for w in caught if issubclass(w.category, AccountantFallbackWarning)]
        self._messages.setdefault(x, texts)
        return min(math.log(max(epsilon, 1e-12 * self._target) / self._target), 20.0)

    def answer(self, x: float) -> PrivacyBound:
        """Returns the bound at the answer, with its warnings; warnings of points tried before do not matter."""
        for text in self._messages[x]:
            warnings.warn(text, AccountantFallbackWarning, stacklevel=4)
        return self._bounds[x]


def check_target(epsilon: float, tolerance: float, delta: float, sample_rate: float) -> None:
    """Raises ValueError if a search has a target or settings that no answer can meet."""
    problems = []
    if not (epsilon > 0 and math.isfinite(epsilon)):
        problems.append(f"epsilon {epsilon} is not a positive finite number: 0 would need infinite noise.")
    elif epsilon < SMALLEST_EPSILON:
        problems.append(
            f"epsilon {epsilon} is out of reach: below {upper_text(SMALLEST_EPSILON)} rounding alone is as large."
        )
    if not 0 < delta < 1:
        problems.append(f"delta {delta} is not in (0, 1): no Gaussian mechanism has one.")
    if not 0 < sample_rate <= 1:
        problems.append(f"sample rate {sample_rate} is not in (0, 1].")
    if not 0 < tolerance < 1:
        problems.append(f"tolerance {tolerance} is not in (0, 1).")
    if problems:
        raise ValueError("\n".join([*problems, "HINT: use for example epsilon=3, delta below 1/N, sample_rate=0.004."]))


# ---- a second accountant's answer, which shows the error of one library


def warn_of_disagreement(
    bound: PrivacyBound,
    entries: Iterable[LedgerEntry],
    delta: float,
    adjacency: str = ADD_REMOVE,
    max_examples_per_unit: int = 1,
) -> None:
    """Asks another accountant for the same epsilon, and warns with both numbers if they differ by over 1 %.

    PLD checks PRV and RDP. PRV checks PLD if both account for the relation exactly; a bracket that contains the other
    number agrees with it. Otherwise RDP checks PLD: its bound is looser by nature, so it disagrees only if it is the
    smaller one.
    """
    if not 0 < bound.epsilon < math.inf:
        return
    releases = collect(entries)
    exact = adjacency == ADD_REMOVE and max_examples_per_unit == 1
    for name in ("pld", "prv", "rdp"):
        if name == bound.accountant or (name == "prv" and not exact):
            continue
        other = answer_by(name, releases, delta, adjacency, max_examples_per_unit)
        if other is not None:
            if _apart(bound, other):
                warnings.warn(_disagreement(bound, other), AccountantDisagreementWarning, stacklevel=3)
            return


def _apart(bound: PrivacyBound, other: PrivacyBound) -> bool:
    if other.accountant == "rdp" and other.epsilon >= bound.epsilon:
        return False
    low, high = (other.lower, other.upper) if other.lower > 0 else (other.epsilon, other.epsilon)
    gap = max(low - bound.epsilon, bound.epsilon - high)
    return gap > NOTICEABLE * min(bound.epsilon, other.epsilon)


def _disagreement(bound: PrivacyBound, other: PrivacyBound) -> str:
    text = (
        f"epsilon is {upper_text(bound.epsilon)} by {bound.accountant} and {upper_text(other.epsilon)} by "
        f"{other.accountant}, for the same releases; the first is what is stated."
    )
    if bound.epsilon < other.epsilon:
        return f"{text}\nHINT: one of them errs; publish the larger one, and report these settings to the project."
    return f"{text}\nHINT: use accountant {other.accountant}"
