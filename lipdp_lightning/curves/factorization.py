"""Factorises prefix sums by their square root, with Gaussian noise: P = B C, B = C = P^(1/2), all by FFT.

P is the lower triangle of ones, and its square root the lower-triangular Toeplitz matrix of the coefficients of (1 -
z)^(-1/2), f_k = binom(2k, k) / 4^k (Henzinger, Upadhyay and Upadhyay 2023; Fichtenberger et al. 2023). The release is B
(C x + z) = P x + B z with z ~ N(0, s^2 I), a post-processing of the Gaussian mechanism on C x.

Sensitivity: adding or removing a record in cell j shifts C x by the column c_j, of norm at most ||c_1||. Replacing j by
k = j + d shifts it by c_j - c_k; moving both cells up by one adds the row (f_{t+d} - f_t)^2 >= 0, so the largest norm
for a distance d is at j = 1, and all distances together are one autocorrelation, by FFT.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import fft

from lipdp_lightning.curves.discrete_noise import FloatArray

_ROUNDING = 1 + 1e-9  # covers the error of the FFT by far, for any grid that fits in memory


def square_root_coefficients(points: int) -> FloatArray:
    """Returns f_0 .. f_{points-1}."""
    k = np.arange(1, points, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def apply_square_root(z: FloatArray) -> FloatArray:
    """Returns P^(1/2) z along the last axis, in O(n log n)."""
    points = z.shape[-1]
    size = fft.next_fast_len(2 * points - 1, real=True)
    product = fft.rfft(square_root_coefficients(points), size) * fft.rfft(z, size)
    return np.asarray(fft.irfft(product, size)[..., :points], dtype=np.float64)


def square_root_variances(points: int) -> FloatArray:
    """Returns the variance of every prefix for z of variance one."""
    return np.cumsum(square_root_coefficients(points) ** 2)


def column_norm(points: int) -> float:
    """Returns the largest shift of C x by one record more or less."""
    return math.sqrt(float(square_root_variances(points)[-1])) * _ROUNDING


def difference_norm(points: int) -> float:
    """Returns the largest shift of C x by moving one record to another cell, or into a cell that no prefix counts."""
    f = square_root_coefficients(points)
    squares = np.cumsum(f**2)
    size = fft.next_fast_len(2 * points - 1, real=True)
    spectrum = fft.rfft(f, size)
    correlation = fft.irfft(spectrum * np.conj(spectrum), size)[:points]
    # ||c_1 - c_{1+d}||^2; the overlap has points - d terms, all that the correlation has at lag d
    shifts = squares[-1] + squares[points - 1 - np.arange(1, points)] - 2 * correlation[1:]
    return math.sqrt(max(float(squares[-1]), float(np.max(shifts, initial=0.0)))) * _ROUNDING


def square_root_sensitivity(points: int, adjacency: str, curves: int) -> float:
    """Returns the L2 sensitivity; of two curves each changes by one column if the label changes, which is the worst
    case.
    """
    if adjacency == "add_remove":
        return column_norm(points)
    return difference_norm(points) if curves == 1 else math.sqrt(curves) * column_norm(points)
