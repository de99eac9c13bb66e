"""Tests whether the noise that leaves a step is the noise that the plan accounts for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ..mechanism.noise import Place
from .confidence import deviation_bounds, shares
from .findings import Curve, Finding, PlotData, verdict
from .subject import Subject

RankSubject = Callable[[Place], Subject]
_VALUES = 200_000
_SMALLEST_P = 1e-300


def direction_p_value(first: Tensor, second: Tensor) -> float:
    """Returns the exact p-value for two independent isotropic vectors: c sqrt((d - 1) / (1 - c^2)) ~ t(d - 1) for
    cosine c.
    """
    freedom = first.numel() - 1
    product = float(first.norm() * second.norm())
    if freedom < 1 or product == 0:
        return 1.0
    cosine = float((first * second).sum()) / product
    if abs(cosine) >= 1 - 1e-12:
        return 0.0
    return 2 * float(stats.t.sf(abs(cosine) * math.sqrt(freedom / (1 - cosine**2)), freedom))


def noise_sample(subject: Subject, releases: int | None = None, first_step: int = 0) -> Tensor:
    """Returns releases of steps without examples, (steps, parameters), which are pure noise."""
    numbers = sum(n for _, n in subject.groups)
    count = releases or max(8, min(200, _VALUES // numbers))
    nothing = subject.nothing()
    return torch.stack([subject.release(nothing, first_step + step) for step in range(count)])


def noise_finding(
    subject: Subject, sample: Tensor, alpha: float, ranks: RankSubject | None = None, worlds: tuple[int, ...] = (2, 4)
) -> Finding:
    """Tests distribution, size and freshness of the noise.

    The tests are: Kolmogorov-Smirnov and variance of every group; independence between steps, between groups, and of a
    step and its repetition from changed weights; the same deviation for every batch size; and, with ``ranks``, the sum
    over processes.
    """
    claimed = subject.claimed_deviations()
    z = sample / claimed.clamp_min(1e-300)
    p_values: dict[str, float] = {}
    _shape(p_values, subject, z)
    _independence(p_values, subject, z)
    p_values["fresh after a change of the weights"] = _changed(subject)
    _sizes(p_values, subject, claimed)
    for world in worlds if ranks is not None else ():
        assert ranks is not None
        _processes(p_values, ranks, world, claimed)
    exact = _has_all_bits(subject)
    share = shares(alpha, len(p_values))
    failed = {name: p for name, p in p_values.items() if p <= share}
    measured = {}
    for name, part in zip(
        (n for n, _ in subject.groups), torch.split(z, [n for _, n in subject.groups], 1), strict=True
    ):
        measured[name] = float(part.square().mean().sqrt())
    deviation = min(measured.values())
    lowest = min(p_values, key=lambda name: p_values[name])
    text = f"Of {len(p_values)} tests the smallest p-value is {p_values[lowest]:.2g} ({lowest}), against {share:.2g}. "
    text += "Deviation over its claim, by group: " + ", ".join(f"{n} {v:.4f}" for n, v in measured.items()) + "."
    if failed:
        text = f"Not as accounted: {', '.join(failed)}. " + text
    if not exact:
        text = "The noise lacks the bits of float64. " + text
    values = {"p_values": p_values, "deviation_over_claim": measured, "alpha_of_each": share, "float64": exact}
    return Finding(
        "noise", "Is the noise Gaussian, of the claimed size, and fresh?", verdict(bool(failed) or not exact), text,
        factor=1 / deviation if deviation > 0 else math.inf, p_value=max(p_values[lowest], 0.0), alpha=share,
        values=values, plots=(_histogram(z),),
    )  # fmt: skip


def _shape(p_values: dict[str, float], subject: Subject, z: Tensor) -> None:
    for (name, _), part in zip(subject.groups, torch.split(z, [n for _, n in subject.groups], 1), strict=True):
        values = part.flatten().numpy()
        p_values[f"{name}: Kolmogorov-Smirnov"] = float(stats.kstest(values, "norm").pvalue)
        p_values[f"{name}: variance"] = variance_p_value(float(np.square(values).sum()), len(values))


def variance_p_value(sum_of_squares: float, count: int) -> float:
    """Returns the two-sided p-value of a sum of ``count`` squared standard normals."""
    tails = stats.chi2.cdf(sum_of_squares, count), stats.chi2.sf(sum_of_squares, count)
    return min(1.0, 2 * float(min(tails)))


def _independence(p_values: dict[str, float], subject: Subject, z: Tensor) -> None:
    pairs = list(itertools.combinations(range(min(len(z), 60)), 2))
    closest = min(direction_p_value(z[i], z[j]) for i, j in pairs)
    p_values["independent between steps"] = min(1.0, closest * len(pairs))
    parts = torch.split(z, [n for _, n in subject.groups], 1)
    found = []
    for (_, first), (_, second) in itertools.combinations(enumerate(parts), 2):
        common = min(first.shape[1], second.shape[1])
        found.append(direction_p_value(first[:, :common].flatten(), second[:, :common].flatten()))
    if found:
        p_values["independent between groups"] = min(1.0, min(found) * len(found))


def _changed(subject: Subject) -> float:
    """Releases the same step from other weights; if its noise were the same, the difference would hold no noise."""
    before = subject.whitened(subject.release(subject.nothing(), 1))
    saved = {name: value.clone() for name, value in subject.module.network.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in subject.parameters:
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    after = subject.whitened(subject.release(subject.nothing(), 1))
    subject.module.network.load_state_dict(saved)
    return direction_p_value(torch.nan_to_num(before, posinf=0.0), torch.nan_to_num(after, posinf=0.0))


def _sizes(p_values: dict[str, float], subject: Subject, claimed: Tensor) -> None:
    """Subtracts two releases of one batch: the sum cancels, and the noise must be that of an empty batch."""
    for size in (2, 16):
        batch = subject.examples(size, seed=size)
        steps = [subject.release(batch, 100 + step) for step in range(8)]
        z = torch.stack([(a - b) / math.sqrt(2) for a, b in zip(steps[::2], steps[1::2], strict=True)]) / claimed
        p_values[f"size at a batch of {size}"] = variance_p_value(float(z.square().sum()), z.numel())


def _processes(p_values: dict[str, float], ranks: RankSubject, world: int, claimed: Tensor) -> None:
    """Tests every process's share of one step, as it enters the reduction."""
    totals: list[Tensor] = []
    for rank in range(world):
        subject = ranks(Place(rank, world))
        for step in range(4):
            subject.release(subject.nothing(), step, reduce=lambda total: totals.append(total.clone()))
        subject.close()
    if len(totals) < 4 * world:  # a step that never reaches the reduction
        p_values[f"sum over {world} processes: variance"] = 0.0
        return
    shares_ = torch.stack(totals).reshape(world, 4, -1)[:, :, : len(claimed)] / claimed.clamp_min(1e-300)
    summed = shares_.sum(0)
    p_values[f"sum over {world} processes: variance"] = variance_p_value(float(summed.square().sum()), summed.numel())
    pairs = [direction_p_value(a.flatten(), b.flatten()) for a, b in itertools.combinations(shares_, 2)]
    p_values[f"{world} processes are independent"] = min(1.0, min(pairs) * len(pairs))


def _has_all_bits(subject: Subject) -> bool:
    seen: list[Tensor] = []
    subject.release(subject.nothing(), 0, reduce=lambda total: seen.append(total.clone()))
    noisy = seen[0][seen[0] != 0] if seen else torch.zeros(0)
    return noisy.dtype == torch.float64 and bool((noisy != noisy.float().double()).double().mean() > 0.9)


def _histogram(z: Tensor) -> PlotData:
    values = z.flatten().numpy()
    edges = np.linspace(-5, 5, 61)
    density, _ = np.histogram(np.clip(values, -5, 5), edges, density=True)
    middle = (edges[:-1] + edges[1:]) / 2
    return PlotData(
        "Noise in units of its claim", "released / claimed deviation", "density",
        (
            Curve("released", middle.tolist(), density.tolist(), "bars"),
            Curve("standard normal", middle.tolist(), stats.norm.pdf(middle).tolist()),
        ),
        f"{len(values)} values of steps without examples.",
    )  # fmt: skip


def group_deviations(subject: Subject, sample: Tensor, alpha: float) -> dict[str, tuple[float, float]]:
    """Returns lower and upper confidence bounds on the deviation of every group, which hold together at 1 - alpha."""
    found = {}
    for (name, _), part in zip(subject.groups, torch.split(sample, [n for _, n in subject.groups], 1), strict=True):
        found[name] = deviation_bounds(float(part.square().sum()), part.numel(), shares(alpha, len(subject.groups)))
    return found
