"""Tests whether the noise covers all groups together, on a configuration and over depths.

K groups whose sums move by Delta_k, with deviations sigma Delta_k each, are one mechanism of multiplier sigma / sqrt(K)
and not sigma: the noise has to grow with the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..bounds.losses import Huber
from ..mechanism.step import Mechanism
from ..privacy.plan import PrivacyPlan
from ..training.module import PrivateModule
from .findings import Curve, Finding, PlotData, verdict
from .noise_checks import group_deviations, noise_sample
from .subject import Subject

WIDTH = 12
DEPTHS = (1, 2, 4, 8)


def composition_finding(subject: Subject, sample: Tensor, alpha: float) -> Finding:
    """Computes sigma sqrt(sum_k Delta_k^2 / sigma_k^2) from measured deviations and from their upper confidence bounds.

    Under ``joint`` the factors already divide by the root of all groups' squares, so the largest tau_k / sigma_k
    counts.
    """
    bounds = group_deviations(subject, sample, alpha)
    claimed, sigma = subject.mechanism.sensitivities(), subject.plan.noise_multiplier
    ratios = {name: claimed[name] / max(upper, 1e-300) for name, (_, upper) in bounds.items() if claimed[name] > 0}
    if subject.joint:
        total = max(ratios.values(), default=0.0)
        words = "the largest claimed threshold over measured deviation"
    else:
        total = math.sqrt(math.fsum(r * r for r in ratios.values()))
        words = "the root of the summed squares of claimed sensitivity over measured deviation"
    factor = sigma * total
    text = (
        f"Times the noise multiplier, {words} is at least {factor:.4f} for {len(ratios)} group(s); "
        f"above 1 the step spends more than one mechanism of multiplier {sigma:.4g}."
    )
    return Finding(
        "composition", "Does the noise cover all layers together?", verdict(factor > 1 + 1e-6), text, factor=factor,
        alpha=alpha, values={"sensitivity_over_deviation": ratios, "noise_multiplier": sigma},
    )  # fmt: skip


def deep_subject(depth: int, plan: PrivacyPlan, kind: type[Mechanism] = Mechanism) -> Subject:
    """Returns a stack of identities without biases, in which one example moves every layer by its whole
    bound at once.
    """
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    module = PrivateModule(nn.Sequential(*layers), Huber(delta=0.5))
    return Subject(module, plan, (WIDTH,), kind=kind)


def depth_factors(
    build: Callable[[int], Subject], alpha: float, depths: tuple[int, ...] = DEPTHS, releases: int = 60
) -> dict[int, float]:
    """Returns sigma sqrt(sum_k ||shift_k||^2 / sigma_k^2) for each depth, with exact shifts and upper bounds on
    deviations.
    """
    factors = {}
    for depth in depths:
        subject = build(depth)
        x = torch.full((WIDTH,), subject.module.input_bound / math.sqrt(WIDTH))
        example = x, 1e3 * torch.sign(x) * 0.5
        shift = subject.by_group(subject.shift(subject.nothing(), example))
        bounds = group_deviations(subject, noise_sample(subject, releases), alpha / len(depths))
        total = math.fsum(float(shift[n].square().sum()) / max(upper, 1e-300) ** 2 for n, (_, upper) in bounds.items())
        factors[depth] = math.sqrt(total) * subject.plan.noise_multiplier
        subject.close()
    return factors


def depth_finding(build: Callable[[int], Subject], alpha: float, depths: tuple[int, ...] = DEPTHS) -> Finding:
    factors = depth_factors(build, alpha, depths)
    worst = max(factors, key=lambda d: factors[d])
    text = "One example's shift of all layers over their measured noise, in units of the claim: " + ", ".join(
        f"{factor:.3f} at {depth} layer(s)" for depth, factor in factors.items()
    )
    return depth_result(factors, factors[worst], text + ".", alpha)


def depth_result(factors: dict[int, float], factor: float, text: str, alpha: float) -> Finding:
    depths = list(factors)
    plot = PlotData(
        "Shift over noise against depth", "layers", "in units of the claim",
        (
            Curve("measured", depths, list(factors.values()), "points"),
            Curve("claim", depths, [1.0] * len(depths)),
            Curve("root of the depth", depths, [math.sqrt(d) for d in depths]),
        ),
        "Noise that does not grow with the number of layers follows the root of the depth.",
    )  # fmt: skip
    return Finding(
        "depth", "Does the total noise grow with the number of layers?", verdict(factor > 1 + 1e-3), text,
        factor=factor, alpha=alpha, values={"factor_by_depth": factors}, plots=(plot,),
    )  # fmt: skip
