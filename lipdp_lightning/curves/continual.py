"""Releases sums under continual observation: after every step of a stream, its running sum with noise (004, 6.3.2).

Two streams are adjacent if they differ in one step. That shifts the sums from this step on, a suffix, by at most high -
low: Laplace noise of scale suffix_cost (high - low) / epsilon, for base 2 ceil((L + 1) / 2) / epsilon on values in [0,
1] (the theorem does not say that values must be bounded; without a bound no scale is enough). The stream may be chosen
in view of the sums released so far: the noise that explains the shift leaves the sums before it unchanged, so the
argument holds at every output separately.

With delta > 0 the noise is Gaussian, 1 / (2 z^2)-zCDP for z the deviation over the L2 norm of the least noise that
explains a suffix: `tree_norm`, which is below the theorem's square root of ceil((L + 1) / 2). This also holds for
streams chosen in view of the sums: Gaussian noise may be rotated into a lower-triangular form (Denisov et al. 2022).
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from lipdp_lightning.curves.discrete_noise import FloatArray, NoiseSource, discrete_laplace, exact_scale, gaussian_noise
from lipdp_lightning.curves.releases import CurveRelease, check_privacy, gaussian_noise_multiplier, zcdp
from lipdp_lightning.curves.reliability import UNIT
from lipdp_lightning.curves.tree import level_sizes, suffix_cost, uniform_fan_outs
from lipdp_lightning.curves.tree_norm import tree_norm


class ContinualSum:
    """Releases (epsilon, delta)-DP running sums of at most `steps` values in [low, high], with one noise per level in
    memory.

    Values are kept in fixed point, (high - low) / 2^16, so that the noise is exact.

    Args:
        steps: the largest number of values.
        epsilon: the epsilon of the whole stream of sums.
        source: the source of the noise.
        low: the smallest value.
        high: the largest value.
        base: the number of children of a node of the tree.
        delta: the delta of the whole stream; 0 for Laplace noise.
    """

    def __init__(
        self,
        steps: int,
        epsilon: float,
        source: NoiseSource,
        low: float = 0.0,
        high: float = 1.0,
        base: int = 2,
        delta: float = 0.0,
    ) -> None:
        check_privacy(epsilon, delta)
        if steps < 1 or not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(
                f"{steps} steps of values in [{low}, {high}]. HINT: use at least one step, and low < high."
            )
        self.steps, self.epsilon, self.low, self.high = steps, epsilon, low, high
        fan_outs = uniform_fan_outs(steps, base)
        leaves = level_sizes(fan_outs)[-1]
        self._spans = [leaves // size for size in level_sizes(fan_outs)]
        self.delta = delta
        self.cost = tree_norm(fan_outs, "add_remove", 1) if delta else float(suffix_cost(fan_outs))
        self.scale: Fraction = self._scale()
        self._stream = source.stream()
        self._noise = np.zeros(len(self._spans))
        self._time, self._sum = 0, 0

    def _scale(self) -> Fraction:
        if not self.delta:
            return exact_scale(int(self.cost) * UNIT, self.epsilon)
        return Fraction(self.cost * UNIT * gaussian_noise_multiplier(self.epsilon, self.delta) * (1 + 1e-12))

    def _draw(self, count: int) -> FloatArray:
        if not self.delta:
            return discrete_laplace(self._stream, count, self.scale).astype(np.float64)
        # the sum is rounded to the fixed point of the values, and not each noise; this is post-processing
        return gaussian_noise(self._stream, count) * float(self.scale)

    def add(self, value: float) -> float:
        """Takes the next value and returns the noisy sum of all values so far."""
        if self._time >= self.steps:
            raise ValueError(f"the stream was declared to have {self.steps} steps. HINT: declare more.")
        if not self.low <= value <= self.high:
            raise ValueError(f"a value lies outside the declared [{self.low:g}, {self.high:g}]. HINT: clip it first.")
        width = self.high - self.low
        self._sum += round((value - self.low) / width * UNIT)
        begins = [level for level, span in enumerate(self._spans) if self._time % span == 0]
        self._noise[begins] = self._draw(len(begins))
        self._time += 1
        return self.low * self._time + width * (self._sum + round(float(self._noise.sum()))) / UNIT

    def booking(self, name: str = "continual sum") -> CurveRelease:
        noise = "Gaussian" if self.delta else "discrete Laplace"
        text = f"{noise} on a tree of {len(self._spans)} levels, sensitivity {self.cost:.6g}, {self.steps} steps"
        rho = zcdp(float(self.scale) / (self.cost * UNIT)) if self.delta else None
        return CurveRelease(name, text, self.epsilon, self.delta, "replace_one", rho)
