"""Epsilons that are exact to many digits, by means that none of the accountants uses; writes exact_epsilons.csv.

    python tests/accounting/exact_epsilons.py

With L the privacy loss of all releases under P, delta(e) = E[(1 - exp(e - L))+], and where M(s) = E[exp(s L)]

    delta(e) = 1/(2 pi i) integral of exp(-s e) M(s) / (s (s + 1)) ds  along Re s = c, for any c > 0.

M of a composition is a product, and M of one step an integral of an analytic function on the line, for which the
trapezoidal rule converges faster than any power. Through the saddle point c nothing cancels, so that a delta of 1e-12
has as many digits as one of 1e-3. No loss is discretised and no tail is cut. One step, and unsampled Gaussians, have
closed forms. A case whose integral has not converged is left out, whatever it would have said.

For a unit of several rows the truth is that of the pair in which all its rows add up, each sampled by itself: a lower
bound on what the group costs.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

FILE = Path(__file__).with_name("exact_epsilons.csv")
CASES = 440
Array = npt.NDArray[np.float64]


class NotConverged(ArithmeticError):
    """The integral is not known to enough digits."""


@dataclass(frozen=True)
class Case:
    """What a ledger releases, and the exact epsilon; ``preliminary`` is a Gaussian release of all rows, 0 if none."""

    adjacency: str
    rate: float
    noise: float
    steps: int
    delta: float
    rows: int = 1
    preliminary: float = 0.0
    epsilon: float = 0.0


def read_cases() -> list[Case]:
    with FILE.open(newline="") as file:
        return [
            Case(r["adjacency"], *(float(r[k]) for k in ("rate", "noise")), int(r["steps"]), float(r["delta"]),
                 int(r["rows"]), float(r["preliminary"]), float(r["epsilon"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip


# ---- one step


def _log_mixture(x: Array, rate: float, noise: float, rows: int, sign: int) -> Array:
    """Log of the mixture's density over that of N(0, noise^2): rows that add up, each in the sample by itself."""
    k = np.arange(rows + 1)
    weights = special.gammaln(rows + 1) - special.gammaln(k + 1) - special.gammaln(rows - k + 1)
    weights = weights + special.xlogy(k, rate) + special.xlog1py(rows - k, -rate)
    exponents = weights[:, None] + (2 * sign * k[:, None] * x[None] - k[:, None] ** 2) / (2 * noise**2)
    return np.asarray(special.logsumexp(exponents, axis=0))


@dataclass(frozen=True)
class Step:
    """The pair of distributions of one step, in units of one row's contribution."""

    direction: str  # REMOVE, ADD, REPLACE
    rate: float
    noise: float
    rows: int

    def logs(self, x: Array) -> tuple[Array, Array]:
        """Log density of P, and the loss log P/Q, at x."""
        base = -0.5 * (x / self.noise) ** 2 - math.log(self.noise * math.sqrt(2 * math.pi))
        up = _log_mixture(x, self.rate, self.noise, self.rows, 1)
        if self.direction == "REMOVE":
            return base + up, up
        if self.direction == "ADD":
            return base, -up
        return base + up, up - _log_mixture(x, self.rate, self.noise, self.rows, -1)

    def log_moment(self, s: npt.NDArray[np.complex128], centre: float, points: int) -> npt.NDArray[np.complex128]:
        """log E_P[exp(s L)] for s of real part ``centre``."""
        reach = (2 * centre + 3) * self.rows + 15 * self.noise
        x = np.linspace(-reach, reach, 4001 if reach < 400 * self.noise else 40_001)
        density, loss = self.logs(x)
        exponent = density + centre * loss
        inside = np.flatnonzero(exponent > exponent.max() - 60)
        low, high = max(inside[0] - 1, 0), min(inside[-1] + 1, len(x) - 1)
        x = np.linspace(x[low], x[high], points)
        density, loss = self.logs(x)
        weight = density + centre * loss
        top = weight.max()
        mass = np.exp(weight - top) * (x[1] - x[0])
        out = np.empty(len(s), dtype=np.complex128)
        for start in range(0, len(s), 256):
            phase = np.exp(1j * np.outer(s[start : start + 256].imag, loss))
            out[start : start + 256] = np.log(phase @ mass)
        return out + top


class Releases:
    """All releases of a case, in one direction."""

    def __init__(self, case: Case, direction: str, points: int) -> None:
        self.step = Step(direction, case.rate, case.noise, case.rows)
        self.case, self.points = case, points
        shift = case.rows * (2 if direction == "REPLACE" else 1)
        self.square = (shift / case.preliminary) ** 2 if case.preliminary else 0.0
        if case.rate == 1:
            self.square += case.steps * (shift / case.noise) ** 2

    def log_moment(self, s: npt.NDArray[np.complex128], points: int = 0) -> npt.NDArray[np.complex128]:
        gaussian = s * (s + 1) * self.square / 2
        if self.case.rate == 1:
            return gaussian
        return gaussian + self.case.steps * self.step.log_moment(s, float(s[0].real), points or self.points)

    def exponent(self, c: float, epsilon: float) -> float:
        moment = self.log_moment(np.array([complex(c)]), points=801)[0].real
        return float(moment - c * epsilon - math.log(c) - math.log1p(c))

    def saddle(self, epsilon: float) -> float:
        found = optimize.minimize_scalar(
            lambda u: self.exponent(math.exp(u), epsilon), bounds=(-7, 11), method="bounded", options={"xatol": 1e-3}
        )
        return math.exp(float(found.x))

    def contour(self, epsilon: float) -> tuple[npt.NDArray[np.complex128], npt.NDArray[np.complex128]]:
        """Points of the half line, and what the integrand has there beside exp(-s epsilon)."""
        c = self.saddle(epsilon)
        near = [self.exponent(c * f, epsilon) for f in (0.99, 1.0, 1.01)]
        curvature = max((near[0] - 2 * near[1] + near[2]) / (0.01 * c) ** 2, 1e-12)
        width = 1 / math.sqrt(curvature)
        spacing = min(width / 12, 2 * math.pi * c / 60)
        parts: list[npt.NDArray[np.complex128]] = []
        logs: list[npt.NDArray[np.complex128]] = []
        while True:
            count = sum(map(len, parts))
            s = c + 1j * spacing * np.arange(count, count + 512)
            parts.append(s)
            logs.append(self.log_moment(s) - np.log(s) - np.log1p(s))
            if logs[-1].real[-256:].max() < logs[0][0].real - 36:
                return np.concatenate(parts), np.concatenate(logs)
            if count > 12_000:
                raise NotConverged(str(self.case))

    def log_delta(self, epsilon: float) -> float:
        """Log of the exact delta at an epsilon."""
        s, logs = self.contour(epsilon)
        return _integral(s, logs, epsilon)

    def epsilon(self) -> float:
        """The epsilon at the case's delta."""
        target = math.log(self.case.delta)
        if self.exponent(self.saddle(1e-6), 1e-6) < target:
            return 0.0
        high = 1.0
        while self.exponent(self.saddle(high), high) > target - 3:
            high *= 2
            if high > 1e4:
                raise NotConverged("epsilon is beyond any use")
        guess = optimize.brentq(lambda e: self.exponent(self.saddle(e), e) - target + 2, 0, high, xtol=1e-3)
        for _ in range(6):
            s, logs = self.contour(max(guess, 1e-9))
            found = self._solve(s, logs, guess, target)
            if abs(found - guess) <= 1e-7 * max(found, 1e-3):
                return found
            guess = found
        raise NotConverged(str(self.case))

    def _solve(
        self, s: npt.NDArray[np.complex128], logs: npt.NDArray[np.complex128], guess: float, log_delta: float
    ) -> float:
        def excess(epsilon: float) -> float:
            return _integral(s, logs, epsilon) - log_delta

        low, high = guess, guess
        span = 0.02 * max(guess, 0.01)
        while excess(low) < 0:
            low, span = low - span, 2 * span
            if low < -1:
                raise NotConverged("below zero")
        while excess(high) > 0:
            high, span = high + span, 2 * span
        return float(optimize.brentq(excess, low, high, xtol=1e-12, rtol=1e-12))


def _integral(s: npt.NDArray[np.complex128], logs: npt.NDArray[np.complex128], epsilon: float) -> float:
    """Log of the integral along the contour, by the trapezoidal rule."""
    value = logs - s * epsilon
    top = value[0].real
    terms = np.exp(value - top).real
    total = (terms.sum() - terms[0] / 2) * float(s[1].imag - s[0].imag) / math.pi
    if total <= 0:
        raise NotConverged("the sum cancels")
    return float(top + math.log(total))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Balle and Wang 2018, in logarithms: of N(0, 1) and N(mu, 1)."""

    def excess(epsilon: float) -> float:
        first, second = special.log_ndtr(mu / 2 - epsilon / mu), epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(first + np.log(-np.expm1(second - first)) - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    return float(optimize.brentq(excess, 0, mu**2 / 2 + 40 * mu, xtol=1e-13, rtol=1e-13))


def one_step_delta(direction: str, rate: float, noise: float, epsilon: float) -> float:
    """The hockey-stick divergence of one step of one row, in closed form: its loss is monotone in x."""
    from mpmath import erfc, exp, findroot, log, mp, mpf, sqrt

    mp.dps = 40
    q, sigma, e = mpf(rate), mpf(noise), mpf(epsilon)

    def above(x: object, mean: int) -> object:
        return erfc((x - mean) / (sigma * sqrt(2))) / 2

    if direction == "REMOVE":
        x = sigma**2 * log((exp(e) - 1 + q) / q) + mpf(1) / 2
        return float((1 - q) * above(x, 0) + q * above(x, 1) - exp(e) * above(x, 0))
    if direction == "ADD":
        if exp(-e) <= 1 - q:
            return 0.0
        x = sigma**2 * log((exp(-e) - 1 + q) / q) + mpf(1) / 2
        below = lambda mean: 1 - above(x, mean)  # noqa: E731
        return float(below(0) - exp(e) * ((1 - q) * below(0) + q * below(1)))

    def loss(x: object) -> object:
        up, down = exp((2 * x - 1) / (2 * sigma**2)), exp((-2 * x - 1) / (2 * sigma**2))
        return log((1 - q + q * up) / (1 - q + q * down)) - e

    x = findroot(loss, (mpf(0), sigma**2 * (e + 2 + log(1 / q)) + 2), solver="anderson", tol=1e-30, maxsteps=500)
    p = (1 - q) * above(x, 0) + q * above(x, 1)
    return float(p - exp(e) * ((1 - q) * above(x, 0) + q * above(x, -1)))


def one_step_epsilon(direction: str, rate: float, noise: float, delta: float) -> float:
    if one_step_delta(direction, rate, noise, 1e-9) <= delta:
        return 0.0

    def excess(epsilon: float) -> float:
        value = one_step_delta(direction, rate, noise, epsilon)
        return math.log(value / delta) if value > 0 else -50.0

    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 1e-9, high, xtol=1e-12))


def exact_epsilon(case: Case, points: int = 3001) -> float:
    """The exact epsilon of a case; for add/remove the larger of both directions, as far as each is known."""
    directions = ("REPLACE",) if case.adjacency == "replace_one" else ("REMOVE", "ADD")
    if case.rate == 1:
        return gaussian_epsilon(math.sqrt(Releases(case, directions[0], points).square), case.delta)
    if case.steps == 1 and case.rows == 1 and not case.preliminary:
        return max(one_step_epsilon(d, case.rate, case.noise, case.delta) for d in directions)
    worst = Releases(case, directions[0], points).epsilon()
    if abs(Releases(case, directions[0], 2 * points).log_delta(worst) - math.log(case.delta)) > 1e-7:
        raise NotConverged("the quadrature of one step is too coarse")
    for direction in directions[1:]:
        try:
            other = Releases(case, direction, points)
            if other.log_delta(worst) > math.log(case.delta):
                worst = max(worst, other.epsilon())
        except (NotConverged, ValueError):
            continue
    return worst


# ---- the grid


def drawn(dice: random.Random) -> Iterator[Case]:
    """Cases without end, extremes included."""
    while True:
        adjacency = "replace_one" if dice.random() < 0.3 else "add_remove"
        rate = dice.choice([1.0, 1.0, *(10 ** dice.uniform(-5, -0.05) for _ in range(8))])
        noise = 10 ** dice.uniform(math.log10(0.3), math.log10(50))
        steps = dice.choice([1, 2, *(int(10 ** dice.uniform(0, 5.3)) for _ in range(5))])
        delta = 10 ** -dice.choice([3, 4, 5, 6, 6, 7, 8, 9, 10, 12, dice.uniform(3, 12)])
        rows = dice.choice([1] * 7 + [2, 3, 6])
        preliminary = dice.choice([0.0, 0.0, 0.0, round(10 ** dice.uniform(0, 2), 3)])
        yield Case(
            adjacency, float(f"{rate:.4g}"), float(f"{noise:.4g}"), steps, float(f"{delta:.3g}"), rows, preliminary
        )


FIXED = (
    Case("add_remove", 0.22446, 8.3725, 65345, 3.351e-4),
    Case("add_remove", 0.1, 4.34, 160_000, 1e-6),
    Case("add_remove", 256 / 60000, 1.1, 14062, 1e-5),
    Case("replace_one", 256 / 60000, 1.1, 14062, 1e-5),
)


def made(count: int) -> Iterator[Case]:
    dice, found = random.Random(20), 0
    source = drawn(dice)
    while found < count:
        case = FIXED[found] if found < len(FIXED) else next(source)
        spread = case.rate * math.sqrt(case.steps * math.expm1(min(1 / case.noise**2, 100)))
        if found >= len(FIXED) and not 3e-3 < case.rows * spread < 20:
            continue
        try:
            with np.errstate(all="ignore"):
                epsilon = exact_epsilon(case)
        except (NotConverged, ValueError, ZeroDivisionError) as error:
            assert found >= len(FIXED), error
            continue
        if 5e-3 < epsilon < 300:
            found += 1
            yield Case(*astuple(case)[:-1], epsilon)


def main() -> None:
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Case)])
        for case in made(CASES):
            writer.writerow([*astuple(case)[:-1], f"{case.epsilon:.10g}"])
            file.flush()


if __name__ == "__main__":
    main()
