"""Makes a curve private: three mechanisms behind one interface, each a linear map of independent noise.

| name            | noise                        | delta | design                                                     |
|-----------------|------------------------------|-------|------------------------------------------------------------|
| `laplace`       | discrete Laplace             | 0     | tree of any base, thesis 6.3.1 with the least sound scale  |
| `gaussian`      | Gaussian                     | > 0   | the same tree, zCDP                                        |
| `factorization` | discrete Laplace or Gaussian | any   | least squares on a wide tree (delta = 0), square root of P |

Two relations exist, and every release states its own:

* `replace_one`: one record takes another value; the number n of records is public, and the last point is n;
* `add_remove`: one record more or less; n is private, and the last point is released with noise like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from lipdp_lightning.curves.discrete_noise import (
    FloatArray,
    IntArray,
    NoiseSource,
    discrete_laplace,
    discrete_laplace_variance,
    exact_scale,
    gaussian_noise,
    on_grid,
)
from lipdp_lightning.curves.factorization import apply_square_root, square_root_sensitivity, square_root_variances
from lipdp_lightning.curves.hierarchy import (
    best_fan_outs,
    estimate_prefixes,
    hierarchy_cost,
    level_counts,
    prefix_variances,
)
from lipdp_lightning.curves.releases import CurveRelease, check_privacy, gaussian_noise_multiplier, zcdp
from lipdp_lightning.curves.tree import path_sums, tree_cost, uniform_fan_outs
from lipdp_lightning.curves.tree_norm import tree_norm

MECHANISMS = ("laplace", "gaussian", "factorization")
Draw = Callable[[int], FloatArray]


@dataclass(frozen=True)
class CurveMechanism:
    """A mechanism for one curve, or for each of the two curves of a labelled data set, of 2^levels points.

    `sensitivity` is the L1 norm (discrete Laplace of scale sensitivity / epsilon) or the L2 norm (Gaussian of deviation
    `scale`) of the worst change of the measurements by one record, all `curves` together.
    """

    name: str
    levels: int
    epsilon: float
    delta: float
    adjacency: str
    curves: int
    fan_outs: tuple[int, ...]
    sensitivity: float
    scale: Fraction

    @property
    def size(self) -> int:
        return 1 << self.levels

    @property
    def pure(self) -> bool:
        return self.delta == 0

    @property
    def total_public(self) -> bool:
        """True if the last point is known, for one curve over a data set whose size is not protected."""
        return self.adjacency == "replace_one" and self.curves == 1

    @property
    def _wide(self) -> bool:
        return self.name == "factorization" and self.pure

    def release(self, histogram: IntArray, source: NoiseSource) -> FloatArray:
        """Returns noisy counts at the points, neither monotone nor in range; the last is exact if the total
        is public.
        """
        assert histogram.shape == (self.size,)
        stream = source.stream()

        def draw(count: int) -> FloatArray:
            if self.pure:
                return discrete_laplace(stream, count, self.scale).astype(np.float64)
            return gaussian_noise(stream, count) * float(self.scale)

        counts = np.cumsum(histogram).astype(np.float64)
        if self._wide:
            # noise is added to integer counts, before least squares
            noisy = self._measure(histogram.astype(np.float64), draw)
        else:
            noise = self._linear(draw, 1)[0]
            noisy = counts + (noise if self.pure else on_grid(noise, float(self.scale)))
        if self.total_public:
            noisy[-1] = counts[-1]
        return noisy

    def _measure(self, histogram: FloatArray, draw: Draw) -> FloatArray:
        """Returns least-squares counts from measured levels; `histogram` may have leading axes."""
        levels = level_counts(histogram, self.fan_outs)
        first = 1 if self.total_public else 0
        noise = np.split(draw(sum(level.size for level in levels[first:])), np.cumsum([x.size for x in levels[first:]]))
        noisy = levels[:first] + [x + z.reshape(x.shape) for x, z in zip(levels[first:], noise, strict=False)]
        return estimate_prefixes(noisy, self.fan_outs, self.total_public)[..., : self.size]

    def _linear(self, draw: Draw, repeats: int) -> FloatArray:
        if self._wide:
            return self._measure(np.zeros((repeats, self.size)), draw)
        if self.name == "factorization":
            return apply_square_root(draw(repeats * self.size).reshape(repeats, self.size))
        return path_sums(draw, self.fan_outs, repeats)[:, : self.size]

    def simulate(self, generator: np.random.Generator, repeats: int) -> FloatArray:
        """Returns the noise of `repeats` imaginary releases; its law is public, so simulating it costs nothing.

        It uses a fast generator, for confidence bands and measurements, and never for a release.
        """

        def draw(count: int) -> FloatArray:
            if not self.pure:
                return generator.standard_normal(count) * float(self.scale)
            p = -math.expm1(-1 / float(self.scale))
            return (generator.geometric(p, count) - generator.geometric(p, count)).astype(np.float64)

        noise = self._linear(draw, repeats)
        if self.total_public:
            noise[:, -1] = 0.0
        return noise

    def variances(self) -> FloatArray:
        """Returns the exact variance of the noise at every point, in counts."""
        one = discrete_laplace_variance(self.scale) if self.pure else float(self.scale) ** 2
        if self._wide:
            unit = prefix_variances(self.fan_outs, self.total_public)[: self.size].copy()
        elif self.name == "factorization":
            unit = square_root_variances(self.size)
        else:
            unit = np.full(self.size, float(len(self.fan_outs) + 1))
        if self.total_public:
            unit[-1] = 0.0
        return one * unit

    def booking(self, name: str) -> CurveRelease:
        """Returns the line of this release in a list of releases."""
        noise = "discrete Laplace" if self.pure else "Gaussian"
        design = {True: f"tree {'x'.join(map(str, self.fan_outs))}", False: "square root"}[bool(self.fan_outs)]
        text = f"{self.name}: {noise} of scale {float(self.scale):.6g}, {design}, sensitivity {self.sensitivity:.6g}"
        rho = None if self.pure else zcdp(float(self.scale) / self.sensitivity)
        return CurveRelease(name, text, self.epsilon, self.delta, self.adjacency, rho)


def curve_mechanism(
    name: str,
    levels: int,
    epsilon: float,
    delta: float = 0.0,
    adjacency: str = "replace_one",
    curves: int = 1,
    base: int = 2,
) -> CurveMechanism:
    """Returns the mechanism of that name, calibrated to (epsilon, delta) for all `curves` together.

    Args:
        name: `laplace`, `gaussian` or `factorization`.
        levels: the grid has 2^levels points.
        epsilon: the epsilon of the release.
        delta: the delta of the release; 0 for pure noise.
        adjacency: `replace_one` or `add_remove`.
        curves: 1, or 2 for the curves of the two classes of a labelled data set.
        base: the branching factor of the trees of `laplace` and `gaussian`.

    Raises:
        ValueError: if the name is unknown, or if delta does not suit the noise.
    """
    check_privacy(epsilon, delta, adjacency)
    if name not in MECHANISMS:
        raise ValueError(f"mechanism {name!r} is unknown. HINT: use one of {', '.join(MECHANISMS)}.")
    if name == "laplace" and delta:
        raise ValueError(
            f"laplace noise is pure, and delta {delta} was given. HINT: leave delta out, or use another mechanism."
        )
    assert curves in (1, 2)
    fan_outs: tuple[int, ...] = ()
    if name != "factorization":
        fan_outs = uniform_fan_outs(1 << levels, base)
        cost = tree_cost(fan_outs, adjacency, curves)
        sensitivity = float(cost) if name == "laplace" else tree_norm(fan_outs, adjacency, curves)
    elif delta == 0:
        fan_outs = best_fan_outs(levels, adjacency, curves)
        cost = hierarchy_cost(fan_outs, adjacency, curves)
        sensitivity = float(cost)
    else:
        # if the total is public, the last row of P is not released, and no other row counts the last cell
        points = (1 << levels) - (1 if adjacency == "replace_one" and curves == 1 else 0)
        sensitivity = square_root_sensitivity(points, adjacency, curves)
    if name == "laplace" or (name == "factorization" and delta == 0):
        scale = exact_scale(cost, epsilon)
    else:
        # rounded up, since the product of floats could fall short by its last bit
        scale = Fraction(sensitivity * gaussian_noise_multiplier(epsilon, delta) * (1 + 1e-12))
    return CurveMechanism(name, levels, epsilon, delta, adjacency, curves, fan_outs, sensitivity, scale)
