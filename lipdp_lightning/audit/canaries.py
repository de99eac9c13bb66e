"""Inserts canaries or leaves them out, many times: lower bounds on the epsilon of a step and of a whole run.

A gradient canary is the largest vector that the claim allows one example to add to the sum; it audits noise,
allocation, sampling and accounting. An input canary is a real example, the worst that the search for neighbours found;
it audits the certificate as well. The observer sees every release (white box) and scores it in the canary's direction.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..bound_text import lower_text, upper_text
from ..privacy.plan import PrivacyPlan
from .confidence import (
    ErrorBounds,
    best_threshold,
    epsilon_from_errors,
    error_bounds,
    gaussian_epsilon,
    mu_from_errors,
    multiplier_not_refuted,
    proportion_upper,
)
from .findings import Curve, Finding, PlotData, verdict
from .optimistic_epsilon import optimistic_epsilon
from .sampling_checks import Sampler
from .subject import Batch, Example, Subject, with_example

_TOGETHER = 128  # releases whose scores are computed together
Scores = tuple[list[float], list[float]]  # scores without the canary, and with it


def gradient_canary(subject: Subject, seed: int = 0) -> Tensor:
    """Returns a random direction in each group, as long as the claim allows: Delta_k, or tau_k / sqrt(K) if it is
    joint.
    """
    sensitivities = subject.mechanism.sensitivities()
    live = sum(1 for name, _ in subject.groups if sensitivities[name] > 0)
    share = 1 / math.sqrt(max(1, live)) if subject.joint else 1.0
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, numbers in subject.groups:
        direction = torch.randn(numbers, dtype=torch.float64, generator=generator)
        parts.append(direction / direction.norm() * sensitivities[name] * share)
    return torch.cat(parts)


def step_scores(
    subject: Subject, trials: int, *, canary: Tensor | None = None, pair: tuple[Batch, Example] | None = None,
    first_step: int = 10_000,
) -> Scores:  # fmt: skip
    """Returns scores of steps without and with a gradient canary, or with an example added to its batch.

    A score is the projection of the release, in units of claimed noise, onto the canary; it is N(0, 1) without the
    canary.
    """
    batch = subject.nothing() if pair is None else pair[0]
    if canary is None:
        assert pair is not None
        moved = subject.whitened(subject.shift(batch, pair[1]))
    else:
        moved = subject.whitened(canary)
    direction = moved / moved.norm()
    # the worst-case observer knows what the batch itself adds
    known = 0.0
    if len(batch[0]):
        with_noise = subject.whitened(subject.release(batch, 0))
        known = float(((with_noise - subject.whitened(subject.release(subject.nothing(), 0))) * direction).sum())
    # a canary of zeros stands for none, and takes no pass of no examples, which the audit of the noise takes
    sides: tuple[tuple[Batch, Tensor | None], ...] = (batch, None if canary is None else 0 * canary), (batch, canary)
    if pair is not None:
        sides = (batch, None), (with_example(*pair), None)
    scores: Scores = ([], [])
    for first in range(0, trials, _TOGETHER):
        steps = range(first_step + 2 * first, first_step + 2 * min(first + _TOGETHER, trials), 2)
        for present, (rows, addition) in enumerate(sides):
            released = torch.stack([subject.release(rows, step + present, addition) for step in steps])
            scores[present].extend(((subject.whitened(released) * direction).sum(1) - known).tolist())
    return scores


def step_finding(name: str, plan: PrivacyPlan, scores: Scores, alpha: float, claimed_run: float) -> Finding:
    """Returns lower bounds on a step's epsilon at the plan's delta, in (epsilon, delta) and GDP form, and for the whole
    run.

    The claim is that one step is 1/sigma-GDP, given that the example is in its sample.
    """
    sigma, delta = plan.noise_multiplier, plan.delta
    mu = 1 / sigma
    trials = len(scores[0])
    at_middle = error_bounds(*scores, mu / 2, alpha / 2)
    at_tail = error_bounds(*scores, best_threshold(mu, trials, delta, alpha / 2), alpha / 2)
    lower_mu = mu_from_errors(at_middle)
    plain = epsilon_from_errors(at_tail, delta)
    claimed = gaussian_epsilon(mu, delta)
    lower = max(plain, gaussian_epsilon(lower_mu, delta))
    multiplier = 1 / lower_mu if lower_mu > 0 else math.inf
    run = run_epsilon(plan, multiplier)
    broken = lower_mu > mu or plain > claimed
    text = (
        f"{trials} steps with the canary and {trials} without show epsilon >= {lower_text(lower)} for one step "
        f"({lower_text(plain)} from the errors alone), {_percent(lower, claimed)} of the {upper_text(claimed)} "
        f"claimed: a noise multiplier of at most {multiplier:.3f} for {sigma:.3f} claimed"
    )
    if run > 0:
        text += f", and so a run of epsilon >= {lower_text(run)} for {upper_text(claimed_run)} claimed, if its samples "
        text += "are as claimed."
    else:
        text += "."
    values = {
        "trials": trials, "mu_lower": lower_mu, "mu_claimed": mu, "epsilon_errors_alone": plain,
        "noise_multiplier_at_most": multiplier, "noise_multiplier_claimed": sigma, "run_epsilon_lower": run,
        "delta": delta, "confidence": 1 - alpha, "share_of_claim": lower / claimed if claimed else math.nan,
    }  # fmt: skip
    return Finding(
        name, "Can an observer of a step tell whether the canary was in it better than claimed?", verdict(broken), text,
        factor=lower_mu / mu, alpha=alpha, epsilon_lower=lower, epsilon_claimed=claimed, values=values,
        plots=(score_plot(scores, alpha), tradeoff_plot(scores, alpha, mu)),
    )  # fmt: skip


def run_epsilon(plan: PrivacyPlan, multiplier: float, steps: int | None = None) -> float:
    """Returns epsilon of ``steps`` of the plan's steps at another noise multiplier, rounded down; 0 if nothing was
    shown.
    """
    if not math.isfinite(multiplier) or multiplier > 50 * plan.noise_multiplier:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = PrivacyPlan(
            dataset_size=plan.dataset_size, expected_batch_size=plan.expected_batch_size, steps=steps or plan.steps,
            noise_multiplier=multiplier, delta=plan.delta,
        )  # fmt: skip
    return optimistic_epsilon(own)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "no part"


# ---- whole runs


def run_scores(
    subject: Subject, sampler: Sampler, runs: int, *, canary: Tensor, steps: int | None = None, first_step: int = 0
) -> Scores:
    """Returns log-likelihood ratios of whole runs; the run's own sampler decides which steps the canary takes part in.

    Everything else is left out, as the worst-case observer would subtract it. Each run has steps of its own, so that
    noise and samples are fresh. For one release the ratio is log(1 - q + q exp(mu z - mu^2 / 2)).
    """
    plan = subject.plan
    length = steps or plan.steps
    rate, nothing = plan.sample_rate, subject.nothing()
    direction = subject.whitened(canary)
    mu = float(direction.norm())
    direction = direction / mu
    scores: Scores = ([], [])
    for run in range(2 * runs):
        inserted, total = run % 2 == 1, 0.0
        for step in range(length):
            number = first_step + run * length + step
            drawn = inserted and (rate == 1 or bool((sampler(1, rate, number, 0, 1) == 0).any()))
            released = subject.release(nothing, number, canary=canary if drawn else None)
            z = float((subject.whitened(released) * direction).sum())
            total += math.log1p(rate * math.expm1(min(mu * z - mu * mu / 2, 700.0)))
        scores[inserted].append(total)
    return scores


def run_finding(
    name: str, plan: PrivacyPlan, scores: Scores, alpha: float, claimed: float, steps: int | None = None
) -> Finding:
    """Audits many whole runs: the first fifth fixes the threshold, and the rest gives the bounds."""
    length = steps or plan.steps
    cut = max(1, len(scores[0]) // 5)
    threshold = middle_threshold(scores[0][:cut], scores[1][:cut])
    rest = [s[cut:] for s in scores]
    errors = error_bounds(rest[0], rest[1], threshold, alpha)
    plain = epsilon_from_errors(errors, plan.delta)
    multiplier = multiplier_not_refuted(errors, plan.sample_rate, length)
    lower = run_epsilon(plan, multiplier, length)
    broken = multiplier < plan.noise_multiplier or plain > claimed
    text = (
        f"{len(rest[0])} runs of {length} steps with the canary and as many without show epsilon >= "
        f"{lower_text(lower)} ({lower_text(plain)} from the errors alone), {_percent(max(lower, plain), claimed)} of "
        f"the {upper_text(claimed)} claimed."
    )
    values = {
        "runs": len(rest[0]), "steps": length, "epsilon_errors_alone": plain, "noise_multiplier_at_most": multiplier,
        "noise_multiplier_claimed": plan.noise_multiplier, "false_positive_upper": errors.false_positive,
        "false_negative_upper": errors.false_negative, "confidence": 1 - alpha,
    }  # fmt: skip
    return Finding(
        name, "Can an observer of whole runs tell whether the canary was in the data better than claimed?",
        verdict(broken), text, factor=plan.noise_multiplier / multiplier, alpha=alpha,
        epsilon_lower=max(lower, plain), epsilon_claimed=claimed, values=values, plots=(score_plot(scores, alpha),),
    )  # fmt: skip


def middle_threshold(without: Sequence[float], inserted: Sequence[float]) -> float:
    """Returns a threshold between the two means, in proportion to the spreads."""
    spreads = float(np.std(without)) + 1e-12, float(np.std(inserted)) + 1e-12
    means = float(np.mean(without)), float(np.mean(inserted))
    return (means[0] * spreads[1] + means[1] * spreads[0]) / sum(spreads)


# ---- plots


def score_plot(scores: Scores, alpha: float) -> PlotData:
    both = np.concatenate([np.asarray(s) for s in scores])
    edges = np.linspace(float(both.min()), float(both.max()) + 1e-9, 41)
    middle = ((edges[:-1] + edges[1:]) / 2).tolist()
    without, with_canary = (np.histogram(part, edges)[0].tolist() for part in scores)
    curves = Curve("without", middle, without, "bars"), Curve("with the canary", middle, with_canary, "line")
    caption = f"Bounds hold at confidence {1 - alpha:.6g}."
    return PlotData("Scores of the canary audit", "score", "trials", curves, caption)


def tradeoff_plot(scores: Scores, alpha: float, mu: float) -> PlotData:
    """Plots the errors over all thresholds beside the claim's trade-off curve; the bounds use two thresholds fixed
    before.
    """
    from scipy import stats

    absent, present = (np.sort(np.asarray(s)) for s in scores)
    cuts = np.quantile(np.concatenate([absent, present]), np.linspace(0, 1, 60))
    first = [float((absent > c).mean()) for c in cuts]
    second = [float((present <= c).mean()) for c in cuts]
    grid = np.linspace(1e-4, 1 - 1e-4, 80)
    claim = stats.norm.cdf(stats.norm.isf(grid) - mu)
    return PlotData(
        "Errors of the observer", "false positives", "false negatives",
        (Curve("measured", first, second), Curve("claim", grid.tolist(), claim.tolist())),
        "Below the claim's curve by more than chance, the claim would be false.",
    )  # fmt: skip


def expected_share(mu: float, trials: int, delta: float, alpha: float) -> float:
    """Returns the share of a true claim that an audit with this many trials is expected to show."""
    from scipy import stats

    miss = proportion_upper(round(float(stats.norm.sf(mu / 2)) * trials), trials, alpha / 4)
    return gaussian_epsilon(mu_from_errors(ErrorBounds(miss, miss, alpha)), delta) / gaussian_epsilon(mu, delta)
