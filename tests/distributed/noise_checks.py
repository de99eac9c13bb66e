"""What the noise of a world of processes must satisfy, as a list of complaints: none for a sound one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

# True noise falls below this once in a thousand checks. Secrets are fixed, so on one machine the outcome repeats;
# another version of torch or kind of processor draws other noise.
SMALLEST_P = 1e-3
SPREADS = 5.0  # of a variance: 6e-7 for one check of true noise
LARGEST_CORRELATION = 4.0  # times 1 / sqrt(n): 6e-5


@dataclass
class Recorded:
    """Noise in units of a group's deviation: own[rank][group] and released[group], each (steps, numbers)."""

    own: list[list[Any]]
    released: list[list[Any]]
    mode: str

    @classmethod
    def read(cls, path: str, size: int, mode: str) -> Recorded:
        own, released = [], []
        for rank in range(size):
            with np.load(f"{path}.{rank}.npz") as file:
                ends = np.cumsum(file["sizes"])[:-1]
                for target, name in ((own, "own"), (released, "released")):
                    groups = np.split(file[name], ends, axis=1)
                    target.append([g / d for g, d in zip(groups, file["deviations"], strict=True)])
        return cls(own, released, mode)


def complaints(recorded: Recorded) -> list[str]:
    """Everything about the noise that is not as it must be."""
    size = len(recorded.released)
    found: list[str] = []
    for group, noise in enumerate(recorded.released[0]):
        found += _law(noise, 1.0, f"released noise of group {group}")
        found += _unrelated(noise, f"group {group}")
    found += _pairs(recorded.released[0], "groups")
    for rank in range(1, size):
        pairs = zip(recorded.released[0], recorded.released[rank], strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            found.append(f"rank {rank} was given other sums than rank 0")
    if size == 1:
        return found
    if recorded.mode in ("replicated", "sharded"):
        if any(np.abs(g).max() > 0 for ranks in recorded.own for g in ranks):
            found.append("noise was added before the sum over ranks")
        return found
    for rank, groups in enumerate(recorded.own):
        for group, noise in enumerate(groups):
            # many more checks than of the sum: at a smaller level
            found += _law(noise, 1 / math.sqrt(size), f"noise of rank {rank} in group {group}", SMALLEST_P / 100)
    for a, b in itertools.combinations(range(size), 2):
        for group in range(len(recorded.own[0])):
            found += _correlation(recorded.own[a][group], recorded.own[b][group], f"ranks {a} and {b}, group {group}")
    return found


def _law(noise: Any, deviation: float, name: str, smallest: float = SMALLEST_P) -> list[str]:
    """Kolmogorov-Smirnov against N(0, deviation^2), over all steps, and the variance of every step."""
    found = []
    scaled = noise / deviation
    p = stats.kstest(scaled.ravel(), "norm").pvalue
    if p < smallest:
        found.append(f"{name}: Kolmogorov-Smirnov p = {p:.2g}")
    for step, row in enumerate([scaled, *scaled]):
        if abs(row.var() - 1) > SPREADS * math.sqrt(2 / row.size):
            found.append(f"{name}: variance {row.var():.4f} of 1 ({'all steps' if step == 0 else f'step {step - 1}'})")
    return found


def _correlation(a: Any, b: Any, name: str, largest: float = LARGEST_CORRELATION) -> list[str]:
    a, b = a.ravel(), b.ravel()
    # about zero and not about the mean: constants would have no correlation
    scale = math.sqrt(float(a @ a) * float(b @ b))
    r = float(a @ b) / scale if scale > 0 else 1.0
    return [f"{name}: correlation {r:.3f}"] if abs(r) > largest / math.sqrt(a.size) else []


def _unrelated(noise: Any, name: str) -> list[str]:
    """All pairs of steps together at the level of one pair: many secrets give thousands of pairs."""
    pairs = list(itertools.combinations(range(len(noise)), 2))
    largest = float(stats.norm.isf(stats.norm.sf(LARGEST_CORRELATION) / len(pairs)))
    return [c for a, b in pairs for c in _correlation(noise[a], noise[b], f"{name}, steps {a} and {b}", largest)]


def _pairs(groups: list[Any], name: str) -> list[str]:
    found = []
    for a, b in itertools.combinations(range(len(groups)), 2):
        width = min(groups[a].shape[1], groups[b].shape[1])
        found += _correlation(groups[a][:, :width], groups[b][:, :width], f"{name} {a} and {b}")
        found += _correlation(groups[a][:, -width:], groups[b][:, -width:], f"ends of {name} {a} and {b}")
    return found
