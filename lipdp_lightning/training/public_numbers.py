"""The public numbers of a mechanism as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bounds.certificate import Certificate
from ..mechanism.step import Mechanism

ON_BOUNDARY = 0.9  # a certified norm counts as maximal within 10 %, since cheap norm updates are loose


def group_rows(mechanism: Mechanism) -> list[dict[str, Any]]:
    """Returns one row per parameter group: bounds, noise and norms, all functions of released weights."""
    sensitivities, deviations = mechanism.sensitivities(), mechanism.deviations()
    norms = mechanism.boundary()
    if not mechanism.certificate.nodes:  # no bound of the network was used
        unbounded = mechanism.plan.scaling == "none"
        return [
            {
                "name": group.name,
                "parameters": group.numel,
                "delta": None if unbounded else sensitivities[group.name],
                "noise_std": deviations[group.name],
            }
            for group in mechanism.certificate.groups
        ]
    rows = []
    for group in mechanism.certificate.groups:
        norm, maximum = norms.get(group.name, (None, None))
        use = group.uses[0]
        rows.append(
            {
                "name": group.name,
                "parameters": group.numel,
                "input_bound": use.input_bound,
                "lipschitz": use.lipschitz,
                "cotangent_bound": sum(u.cotangent_bound for u in group.uses),
                "delta": sensitivities[group.name],
                "noise_std": deviations[group.name],
                "weight_norm": norm,
                "max_norm": maximum,
                "on_boundary": None if maximum is None or norm is None else norm >= ON_BOUNDARY * maximum,
            }
        )
    return rows


def averaged_rows(certificate: Certificate, maxima: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Returns one row per parameter group of weights without noise of their own, such as an average."""
    worst_case = certificate.sensitivities("worst_case")
    return [
        {
            "name": group.name,
            "parameters": group.numel,
            "input_bound": group.uses[0].input_bound,
            "lipschitz": group.uses[0].lipschitz,
            "cotangent_bound": sum(u.cotangent_bound for u in group.uses),
            "worst_case": worst_case[group.name],
            "max_norm": maxima.get(group.name),
        }
        for group in certificate.groups
    ]
