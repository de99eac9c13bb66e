"""Accounts for curves: Gaussian noise for (epsilon, delta), and the list of releases with its sum.

Curves are pure or approximate DP events outside the training ledger of subsampled Gaussians. They are composed by
adding epsilons and deltas, which is valid for any mechanisms in any order, even if each is chosen in view of earlier
results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr

ADJACENCIES = ("add_remove", "replace_one")


def check_privacy(epsilon: float, delta: float = 0.0, adjacency: str = "replace_one") -> None:
    """Raises one ValueError that lists everything wrong with the declared privacy."""
    problems = []
    if not (epsilon > 0 and math.isfinite(epsilon)):
        problems.append(f"epsilon {epsilon} is not a positive finite number.")
    if not 0 <= delta < 1:
        problems.append(f"delta {delta} is not in [0, 1).")
    if adjacency not in ADJACENCIES:
        problems.append(f"adjacency {adjacency!r} is not one of {', '.join(ADJACENCIES)}.")
    if problems:
        raise ValueError(" ".join(problems) + " HINT: use, for example, epsilon 1, delta 0 or 1e-6, replace_one.")


def gaussian_delta(epsilon: float, noise_multiplier: float) -> float:
    """Returns the exact delta of the Gaussian mechanism (Balle and Wang 2018): Phi(a) - e^epsilon Phi(b)."""
    a = 1 / (2 * noise_multiplier) - epsilon * noise_multiplier
    b = -1 / (2 * noise_multiplier) - epsilon * noise_multiplier
    first, second = float(log_ndtr(a)), epsilon + float(log_ndtr(b))
    return 0.0 if second >= first else math.exp(first) * -math.expm1(second - first)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the least deviation, for L2 sensitivity one, that is (epsilon, delta)-DP; rounded up by 1e-9."""
    if not 0 < delta < 1:
        raise ValueError(f"delta {delta} is not in (0, 1), and Gaussian noise is never pure. HINT: use --delta 1e-6.")
    low, high = -20.0, 20.0
    log_multiplier = brentq(lambda x: gaussian_delta(epsilon, math.exp(x)) - delta, low, high, xtol=1e-12)
    multiplier = math.exp(float(log_multiplier)) * (1 + 1e-9)
    assert gaussian_delta(epsilon, multiplier) <= delta
    return multiplier


def zcdp(noise_multiplier: float) -> float:
    """Returns rho of the Gaussian mechanism: 1 / (2 z^2)."""
    return 1 / (2 * noise_multiplier**2)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns epsilon of rho-zCDP at delta (Bun and Steinke 2016, proposition 1.3): rho + 2 sqrt(rho log(1 /
    delta)).
    """
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


@dataclass(frozen=True)
class CurveRelease:
    """One release about a data set, and its own cost; `rho` is set if it is also zCDP."""

    name: str
    mechanism: str
    epsilon: float
    delta: float
    adjacency: str
    rho: float | None = None

    def __post_init__(self) -> None:
        check_privacy(self.epsilon, self.delta, self.adjacency)


class ReleaseList:
    """The releases about one data set under one relation; their guarantee is the sum."""

    def __init__(self) -> None:
        self._releases: list[CurveRelease] = []

    def record(self, release: CurveRelease) -> None:
        """Appends a release. There is deliberately no way to remove one."""
        if self._releases and release.adjacency != self._releases[0].adjacency:
            raise ValueError(
                f"a release under {release.adjacency} cannot be added to ones under {self._releases[0].adjacency}. "
                "HINT: use one relation for all curves of a data set."
            )
        self._releases.append(release)

    @property
    def epsilon(self) -> float:
        return math.fsum(release.epsilon for release in self._releases)

    @property
    def delta(self) -> float:
        return math.fsum(release.delta for release in self._releases)

    def __iter__(self) -> Iterator[CurveRelease]:
        return iter(self._releases)

    def __len__(self) -> int:
        return len(self._releases)

    def to_dict(self) -> dict[str, Any]:
        return {
            "releases": [dataclasses.asdict(release) for release in self._releases],
            "epsilon_sum": self.epsilon,
            "delta_sum": self.delta,
            "composition": "basic: epsilons and deltas add",
        }
