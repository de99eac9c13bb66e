"""A primal-dual interior-point method for sparse convex quadratic programs with inequalities.

minimise x'Qx / 2 subject to Gx >= h, by Mehrotra's predictor and corrector. Every iteration factorises
Q + G' diag(z / s) G once; the caller sees to it that this has little fill.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csc_array, csr_array, diags_array
from scipy.sparse.linalg import splu

from lipdp_lightning.curves.noise import FloatArray

_ITERATIONS = 100
_TO_BOUNDARY = 0.995


def solve_quadratic(
    quadratic: csc_array, constraints: csr_array, bounds: FloatArray, tolerance: float = 1e-9
) -> FloatArray:
    """The minimiser, to a relative duality gap and infeasibility of `tolerance`; Q must be positive definite."""
    transpose = constraints.T.tocsc()
    x = np.zeros(quadratic.shape[0])
    scale = 1.0 + float(np.max(np.abs(bounds), initial=0.0))
    s = np.maximum(constraints @ x - bounds, scale)
    z = np.full(len(bounds), scale)
    for _ in range(_ITERATIONS):
        dual = quadratic @ x - transpose @ z
        primal = constraints @ x - bounds - s
        mean = float(s @ z) / len(bounds)
        objective = float(x @ (quadratic @ x)) / 2
        gap = float(s @ z) / (1 + abs(objective))
        if max(float(np.max(np.abs(dual))), float(np.max(np.abs(primal)))) <= tolerance * scale and gap <= tolerance:
            return x
        system = splu(
            (quadratic + transpose @ diags_array(z / s) @ constraints).tocsc(),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )

        def direction(
            target: FloatArray,
            system: object = system,
            dual: FloatArray = dual,
            primal: FloatArray = primal,
            s: FloatArray = s,
            z: FloatArray = z,
        ) -> tuple[FloatArray, FloatArray, FloatArray]:
            right = -dual - transpose @ ((target + z * primal) / s)
            dx = system.solve(right)  # type: ignore[attr-defined]
            ds = constraints @ dx + primal
            return dx, ds, -(target + z * ds) / s

        _, ds, dz = direction(s * z)
        affine = float((s + _step(s, ds) * ds) @ (z + _step(z, dz) * dz)) / len(bounds)
        centre = (affine / mean) ** 3 * mean
        dx, ds, dz = direction(s * z + ds * dz - centre)
        primal_step, dual_step = _TO_BOUNDARY * _step(s, ds), _TO_BOUNDARY * _step(z, dz)
        step = min(1.0, primal_step, dual_step) if min(primal_step, dual_step) < 1 else 1.0
        x, s, z = x + step * dx, s + step * ds, z + step * dz
    raise ArithmeticError("the interior-point method has not converged. HINT: smooth with the metric 'points'.")


def _step(value: FloatArray, change: FloatArray) -> float:
    """The largest step that keeps the value non-negative, at most 1 / 0.995 so that a full step is possible."""
    falling = change < 0
    longest = 1 / _TO_BOUNDARY
    return min(longest, float(np.min(-value[falling] / change[falling], initial=longest)))
