"""Declared shares of the noise, by patterns of the groups' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

_SUM_TOLERANCE = 1e-9


def shares_of(names: list[str], weights: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Returns each group's share of the budget, and what is wrong with the weights."""
    problems = [
        f"the weight of {pattern!r} is {weight}; a group without a share needs infinite noise.\n"
        "  HINT: weights are positive numbers that sum to 1."
        for pattern, weight in weights.items()
        if not (math.isfinite(weight) and weight > 0)
    ]
    total = math.fsum(weights.values())
    if not problems and abs(total - 1) > _SUM_TOLERANCE:
        scaled = ", ".join(f"{pattern}: {weight / total:.6g}" for pattern, weight in weights.items())
        problems.append(
            f"the weights sum to {total:.12g}, {'more' if total > 1 else 'less'} than the budget.\n"
            f"  HINT: they must sum to 1; scaled, they read {scaled}."
        )
    owner = {name: next((p for p in weights if fnmatchcase(name, p)), None) for name in names}
    members = {pattern: [name for name in names if owner[name] == pattern] for pattern in weights}
    listing = ", ".join(names)
    for pattern in weights:
        if not members[pattern]:
            matched = any(fnmatchcase(name, pattern) for name in names)
            reason = "matches only groups that an earlier pattern takes" if matched else "matches no group"
            problems.append(f"the pattern {pattern!r} {reason}.\n  HINT: the groups are {listing}.")
    orphans = [name for name in names if owner[name] is None]
    if orphans:
        problems.append(
            f"no pattern matches {', '.join(orphans)}; a group without a share needs infinite noise.\n"
            "  HINT: end the weights with '*' and what remains of the budget."
        )
    return {
        name: weights[pattern] / len(members[pattern]) for pattern in weights for name in members[pattern]
    }, problems
