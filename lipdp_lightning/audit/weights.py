"""Ascends over the weights while keeping every layer's certified norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..bounds.certificate import Certificate
from ..bounds.certifier import Certifier
from .measure import Meter, slopes

if TYPE_CHECKING:
    from .attack import Best


def ascend_weights(
    meter: Meter, certifier: Certifier, certificate: Certificate, inputs: Tensor, labels: Tensor, goals: Tensor,
    best: Best, steps: int,
) -> Certificate:  # fmt: skip
    """Changes the meter's model in place so that the candidates' goals grow, and returns its new certificate.

    Every point is measured against the certificate of its own weights. A step that fails is undone.
    """
    parameters = meter.trained()
    norms = {use.node: use.lipschitz for group in certificate.groups for use in group.uses}
    vectors = {n: float(p.detach().norm()) for n, p in parameters.items() if p.dim() < 2}
    size = 0.2
    value, held, uphill = _evaluate(meter, certificate, inputs, labels, goals, best)
    for _ in range(steps):
        with torch.no_grad():
            for name, p in parameters.items():
                length = uphill[name].norm().clamp_min(1e-300)
                p.add_(uphill[name] / length * p.norm().clamp_min(1e-3) * size)
        _restore_norms(certifier, parameters, norms, vectors)
        trial = certifier.certify()
        reached, point, found = _evaluate(meter, trial, inputs, labels, goals, best)
        if reached > value:
            value, held, uphill, certificate, size = reached, point, found, trial, min(1.3 * size, 1.0)
            continue
        size *= 0.5
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(held[name])
    return certifier.certify()


def _evaluate(
    meter: Meter, certificate: Certificate, inputs: Tensor, labels: Tensor, goals: Tensor, best: Best
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns the sum of the goals' logarithms, the weights that it belongs to, and its gradient with
    respect to them.
    """
    live = {n: p.detach().clone().requires_grad_() for n, p in meter.trained().items()}
    ratios = meter.ratios(inputs, labels, certificate, live).flat()
    best.see(ratios, inputs, labels)
    goal = ratios.gather(1, goals.unsqueeze(1)).clamp_min(1e-30).log().sum()
    found = slopes(goal, list(live.values())) or [torch.zeros_like(p) for p in live.values()]
    return float(goal.detach()), {n: p.detach() for n, p in live.items()}, dict(zip(live, found, strict=True))


@torch.no_grad()
def _restore_norms(
    certifier: Certifier, parameters: dict[str, Tensor], norms: dict[str, float], vectors: dict[str, float]
) -> None:
    """Scales weights back to their certified operator norm, and biases and other vectors to their length."""
    for group in certifier.certify().groups:
        factors = [norms[u.node] / u.lipschitz for u in group.uses if u.lipschitz > 0]
        for name in group.parameters:
            p = parameters[name]
            if p.dim() >= 2 and factors:
                p.mul_(min(factors))
            elif p.dim() < 2:
                p.mul_(vectors[name] / p.norm().clamp_min(1e-30))
