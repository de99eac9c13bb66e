"""Lower bounds on epsilon as papers derive them, worked out here apart from the ones that the audit uses.

Each takes scores of canaries and an alpha, and exceeds the true value with a probability of at most alpha.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

Floats = npt.NDArray[np.float64]

# ---- the Gaussian mechanism


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism at delta, from its privacy loss N(mu^2 / 2, mu^2)."""

    def excess(epsilon: float) -> float:
        loss = special.ndtr(mu / 2 - epsilon / mu)
        return float(loss - np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)) - delta)

    return float(optimize.brentq(excess, 0.0, 200.0, xtol=1e-12)) if mu > 0 and excess(0.0) > 0 else 0.0


# ---- many runs: canaries inserted or not


def most_likely(successes: npt.ArrayLike, trials: int, alpha: float) -> Floats:
    """Clopper and Pearson: the largest chance under which so few successes have a probability of alpha."""
    count = np.asarray(successes, dtype=np.float64)
    bound = special.bdtri(np.minimum(count, trials - 1), trials, alpha)
    return np.where(count >= trials, 1.0, bound)


def errors_at(absent: Floats, present: Floats, cuts: npt.ArrayLike, alpha: float) -> tuple[Floats, Floats]:
    """Upper bounds on both errors at every cut, each failing with alpha / 2."""
    places = np.asarray(cuts)
    false_positive = (absent[:, None] > places).sum(0)
    false_negative = (present[:, None] <= places).sum(0)
    return most_likely(false_positive, len(absent), alpha / 2), most_likely(false_negative, len(present), alpha / 2)


def epsilon_at(absent: Floats, present: Floats, cuts: npt.ArrayLike, delta: float, alpha: float) -> float:
    """Jagielski, Ullman and Oprea (2020), both ways round; alpha is divided by the number of cuts."""
    places = np.atleast_1d(np.asarray(cuts, dtype=np.float64))
    first, second = errors_at(absent, present, places, alpha / len(places))
    best = 0.0
    for small, other in ((first, second), (second, first)):
        seen = 1 - other - delta
        if (seen > 0).any():
            best = max(best, float(np.log(seen[seen > 0] / small[seen > 0]).max()))
    return best


def mu_at(absent: Floats, present: Floats, cuts: npt.ArrayLike, alpha: float) -> float:
    """Nasr et al. (2023): the mu of a Gaussian mechanism that allows both errors; alpha is divided by the cuts."""
    places = np.atleast_1d(np.asarray(cuts, dtype=np.float64))
    first, second = errors_at(absent, present, places, alpha / len(places))
    return max(0.0, float((-special.ndtri(first) - special.ndtri(second)).max()))


def split_epsilon(absent: Floats, present: Floats, cuts: Floats, delta: float, alpha: float) -> float:
    """The first half of the scores chooses the cut, and the second is bounded there."""
    half = len(absent) // 2
    chosen = max(cuts, key=lambda cut: epsilon_at(absent[:half], present[:half], cut, delta, alpha))
    return epsilon_at(absent[half:], present[half:], chosen, delta, alpha)


# ---- one run: every canary in the data by a fair coin


def count_guesses(coins: npt.NDArray[np.bool_], scores: Floats, guesses: int) -> int:
    """Right guesses, where the highest scores are guessed to be in and as many of the lowest to be out."""
    order = np.argsort(scores)
    half = guesses // 2
    return int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())


def largest_refuted(refuted: Callable[[float], bool], top: float = 64.0) -> float:
    """The largest value that is refuted, where a smaller one always is; 0 if none is."""
    low, high = 0.0, top
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def randomised_response_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Steinke, Nasr and Jagielski (2023): tail of the coins of randomised response, with a price for delta."""
    chance = special.expit(epsilon)

    def at_least(count: int) -> float:
        return 1.0 if count <= 0 else float(special.bdtrc(count - 1, guesses, chance))

    tail = at_least(correct)
    steepest = max(((at_least(correct - i) - tail) / i for i in range(1, correct + 1)), default=0.0)
    return min(1.0, tail + 2 * canaries * delta * steepest)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    return largest_refuted(
        lambda epsilon: randomised_response_p_value(canaries, guesses, correct, epsilon, delta) <= alpha
    )


def guesses_refute_mu(canaries: int, guesses: int, correct: int, mu: float, alpha: float) -> bool:
    """Mahloujifar, Melis and Chaudhuri (2024), for the trade-off curve of a Gaussian mechanism.

    Take a random canary. With W right guesses, let r_i be the probability that it is guessed rightly and W >= i, and
    h_i that it is guessed wrongly and W >= i. Its coin turned over, a right guess is a wrong one with one right guess
    less, so that r_(i+1) <= curve(h_i). P[W = i] puts i / (guesses - i) times as much into r as into h, and all of r_0
    + h_0 is guesses / canaries. If P[W >= correct] were alpha, the probabilities would grow beyond that: then not.
    """
    right, wrong = alpha * correct / canaries, alpha * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        needed = max(wrong, float(special.ndtr(special.ndtri(right) - mu)) if right < 1 else 1.0)
        if needed == wrong:
            break  # nothing grows any more
        right += count / (guesses - count) * (needed - wrong)
        wrong = needed
        if right + wrong > guesses / canaries:
            return True
    return right + wrong > guesses / canaries


def one_run_mu(canaries: int, guesses: int, correct: int, alpha: float) -> float:
    return largest_refuted(lambda mu: guesses_refute_mu(canaries, guesses, correct, mu, alpha), top=20.0)
