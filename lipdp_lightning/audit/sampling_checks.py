"""Tests whether batches are Poisson samples: sizes, repetitions, rates, empty samples, and the shares of processes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ..privacy.plan import PrivacyPlan
from ..training import batches
from .confidence import shares
from .findings import Curve, Finding, PlotData, verdict
from .subject import SECRET

# (rows that exist, sample rate, step, rank, number of processes) -> row ids
Sampler = Callable[[int, float, int, int, int], Tensor]
SPARSE_ROWS, SPARSE_RATE = 50, 0.02
LARGEST = 200_000


def plan_sampler(plan: PrivacyPlan, secret: bytes = SECRET) -> Sampler:
    """Returns the sampler of a run under the plan; another rate than the plan's uses a plan of another batch size."""
    import dataclasses
    import warnings

    known: dict[tuple[int, float, int, int], Callable[[int, int], Tensor]] = {}

    def draw(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
        key = rows, rate, rank, world
        if key not in known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                own = dataclasses.replace(plan, expected_batch_size=rate * plan.dataset_size)
            known[key] = batches.planned_draws(secret, own, rows, rank, world, 1)
        return known[key](step, 0)

    return draw


def sampling_finding(sampler: Sampler, rows: int, rate: float, alpha: float, steps: int = 200) -> Finding:
    """Runs six statistical tests and two exact ones, which all hold for Poisson sampling and for nothing else in the
    gallery.
    """
    rows = min(rows, LARGEST)
    samples = [sampler(rows, rate, step, 0, 1) for step in range(steps)]
    sizes = np.array([len(s) for s in samples], dtype=float)
    p_values: dict[str, float] = {}
    if rate < 1:
        p_values["mean size"] = float(stats.binomtest(int(sizes.sum()), rows * steps, rate).pvalue)
        p_values["spread of sizes"] = dispersion_p_value(sizes, rows, rate)
        p_values["independent between steps"] = overlap_p_value(samples, rows)
        counts = torch.zeros(rows, dtype=torch.float64)
        for sample in samples:
            counts.index_add_(0, sample, torch.ones(len(sample), dtype=torch.float64))
        p_values["same rate for all rows"] = dispersion_p_value(counts.numpy(), steps, rate)
        p_values |= _sparse(sampler, steps)
    broken = _exact(sampler, rows, rate, samples)
    share = shares(alpha, len(p_values))
    failed = [name for name, p in p_values.items() if p <= share] + broken
    lowest = min(p_values, key=lambda n: p_values[n], default="none")
    text = f"{steps} samples, {sizes.mean():.1f} rows on average for {rows * rate:.1f} claimed, standard deviation "
    text += f"{sizes.std():.2f} for {math.sqrt(rows * rate * (1 - rate)):.2f}; smallest p-value "
    text += f"{p_values.get(lowest, 1.0):.2g} ({lowest}), against {share:.2g}."
    if failed:
        text = f"Not Poisson sampling as accounted: {', '.join(failed)}. " + text
    values = {"p_values": p_values, "alpha_of_each": share, "broken": broken, "steps": steps}
    return Finding(
        "sampling", "Are batches Poisson samples?", verdict(bool(failed)), text, p_value=p_values.get(lowest),
        alpha=share, factor=float(sizes.mean()) / (rows * rate), values=values, plots=(_plot(sizes, rows, rate),),
    )  # fmt: skip


def dispersion_p_value(counts: np.ndarray, trials: int, rate: float) -> float:
    """Returns the p-value of sum (c - n q)^2 / (n q (1 - q)) for independent c ~ Bin(n, q), by a moment-matched gamma
    law.
    """
    spread = trials * rate * (1 - rate)
    statistic = float(np.square(counts - trials * rate).sum() / spread)
    mean = len(counts)
    variance = len(counts) * (2 + (1 - 6 * rate * (1 - rate)) / spread)
    shape, scale = mean**2 / variance, variance / mean
    tails = stats.gamma.cdf(statistic, shape, scale=scale), stats.gamma.sf(statistic, shape, scale=scale)
    return min(1.0, 2 * float(min(tails)))


def overlap_p_value(samples: list[Tensor], rows: int) -> float:
    """Tests the number of rows that two consecutive samples share, given their sizes; disjoint pairs of steps are
    independent.

    Each number is hypergeometric; their sum is approximated by a normal law, or by a Poisson law where few are
    expected.
    """
    seen = expected = variance = 0.0
    for first, second in zip(samples[::2], samples[1::2], strict=False):
        law = stats.hypergeom(rows, len(first), len(second))
        seen += float(torch.isin(first, second).sum())
        expected, variance = expected + float(law.mean()), variance + float(law.var())
    if variance < 50:
        tails = stats.poisson.cdf(seen, expected), stats.poisson.sf(seen - 1, expected)
        return min(1.0, 2 * float(min(tails)))
    return float(2 * stats.norm.sf(max(0.0, abs(seen - expected) - 0.5) / math.sqrt(variance)))


def _sparse(sampler: Sampler, steps: int) -> dict[str, float]:
    """Tests few rows at a small rate: a third of the samples is empty, and an empty sample is a step like any other."""
    sizes = np.array([len(sampler(SPARSE_ROWS, SPARSE_RATE, step, 0, 1)) for step in range(steps)])
    empty = float((1 - SPARSE_RATE) ** SPARSE_ROWS)
    total = int(sizes.sum())
    return {
        "empty samples": float(stats.binomtest(int((sizes == 0).sum()), steps, empty).pvalue),
        "mean size of sparse samples": float(stats.binomtest(total, SPARSE_ROWS * steps, SPARSE_RATE).pvalue),
    }


def _exact(sampler: Sampler, rows: int, rate: float, samples: list[Tensor]) -> list[str]:
    broken = []
    for world in (2, 4):
        for step, whole in enumerate(samples[:8]):
            parts = torch.cat([sampler(rows, rate, step, rank, world) for rank in range(world)])
            if not torch.equal(parts.sort().values, whole.sort().values):
                broken.append(f"{world} processes do not share out one sample")
                break
    kept = rows - max(1, rows // 10)
    if any(not torch.equal(sampler(kept, rate, t, 0, 1), s[s < kept]) for t, s in enumerate(samples[:8])):
        broken.append("rows that are removed change the draws of the others")
    if any(len(sample) != len(sample.unique()) for sample in samples):
        broken.append("a row is drawn twice in one sample")
    return broken


def _plot(sizes: np.ndarray, rows: int, rate: float) -> PlotData:
    low, high = int(sizes.min()), int(sizes.max())
    edges = np.linspace(low - 0.5, high + 0.5, min(30, high - low + 1) + 1)
    found, _ = np.histogram(sizes, edges)
    middle = ((edges[:-1] + edges[1:]) / 2).tolist()
    expected = np.diff(stats.binom.cdf(np.floor(edges), rows, rate)) * len(sizes)
    return PlotData(
        "Sizes of the samples", "rows in a sample", "samples",
        (Curve("drawn", middle, found.tolist(), "bars"), Curve("binomial", middle, expected.tolist())),
        "Sizes of Poisson samples are binomial. Fixed sizes or shuffled epochs have another law.",
    )  # fmt: skip
