"""Public numbers of a mechanism as rows of a table."""

from __future__ import annotations

from typing import Any

from ..mechanism.mechanism import Mechanism

ON_BOUNDARY = 0.9  # a certified norm within 10 % of its maximum: the slack of cheap norm updates


def group_rows(mechanism: Mechanism) -> list[dict[str, Any]]:
    """One row per parameter group: bounds, noise and norms, all functions of released weights."""
    sensitivities, deviations = mechanism.sensitivities(), mechanism.deviations()
    norms = mechanism.boundary()
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
