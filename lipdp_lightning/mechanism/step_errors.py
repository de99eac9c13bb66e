"""Errors for a step that is not the certified one, and for requests that cannot be private.

If a use of a layer were missing, the later ones would be paired with the bounds of others; and no noise covers a use
for which the certificate has no bound. Hence both must agree exactly, or nothing is released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

Allocation = Literal["equal", "global", "optimal", "custom"]
Mode = Literal["distributed", "replicated", "sharded"]
_MINIMAL_DIGEST = 16


def trained_otherwise(names: Sequence[str]) -> ValueError:
    """Returns the error for layers thawed or frozen after set-up; their raw gradients could reach the optimizer."""
    return ValueError(
        f"{', '.join(names)}: what is trained changed after set-up, and noise is drawn for the layers "
        "trained then. HINT: freeze or thaw layers before training starts, and use one run for each phase."
    )


def changed_network(differences: Sequence[str]) -> ValueError:
    """Returns the error for a network that is another than the one that was certified."""
    return ValueError(
        f"the network was changed after set-up: {'; '.join(differences)}. Its certificate, and the noise that "
        "is drawn for its layers, are those of the network as it was. HINT: decide hooks, layers, constants "
        "and what is trained before training starts, and use one run for each phase; values of parameters "
        "and buffers may be loaded in place."
    )


def changed_weights(when: str) -> AssertionError:
    """Returns the error for weights or buffers that changed between the certificate and the release.

    It is raised as such, so that it is there also where Python leaves out assert statements.
    """
    return AssertionError(
        f"the weights changed {when}, or a buffer did: the gradients are not those of the step's certificate. "
        "HINT: change weights and buffers between steps, and keep no state that forward updates."
    )


def other_uses(used: Sequence[str], expected: Sequence[str]) -> ValueError:
    """Returns the error for uses that the certificate does not have."""
    return ValueError(
        f"a forward pass with gradients used the layers {_listed(used)}, and the certificate bounds the uses "
        f"{_listed(expected)}, in this order: the bounds would belong to other gradients than those that "
        "are released. HINT: run one forward pass of the certified network for each micro-batch, without "
        "torch.no_grad() around trained layers and without checkpointing; look at it under torch.no_grad()."
    )


def replaced_reports() -> ValueError:
    """Returns the error for a layer that reports to something else than the mechanism has set."""
    return ValueError(
        "a layer's gradient_scaler or gradient_keeper was replaced after the mechanism had set it: the "
        "gradients are not scaled as the noise assumes. HINT: leave them to the mechanism."
    )


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(path or "the network" for path in paths[:12]) or "(none)"
    return shown + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")


# ---- how the noise is shared


def checked_weights(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    noise_multiplier: float,
    allocation: str,
    weights: Mapping[str, float] | None,
) -> dict[str, float]:
    """Returns the weight of every group (empty unless custom); raises ValueError with every problem of a request."""
    problems = []
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        problems.append(
            f"noise_multiplier is {noise_multiplier}; without noise nothing is private.\n"
            "  HINT: give a positive noise_multiplier, or an epsilon to derive it from."
        )
    for name, value in sensitivities.items():
        if not (math.isfinite(value) and value >= 0):
            problems.append(
                f"group {name} has sensitivity {value}; only a finite bound can be covered by noise.\n"
                "  HINT: bound its input and its cotangent (input clipping, loss_clip, projection)."
            )
        if sizes.get(name, 0) < 1:
            problems.append(
                f"group {name} has {sizes.get(name, 'no')} parameters.\n  HINT: pass the size of every group."
            )
    if allocation not in get_args(Allocation):
        problems.append(f"allocation is {allocation!r}.\n  HINT: use one of {', '.join(get_args(Allocation))}.")
    elif (allocation == "custom") != (weights is not None):
        problems.append(
            f"allocation is {allocation!r} and weights are {'missing' if weights is None else 'given'}.\n"
            "  HINT: weights belong to allocation 'custom', and it needs them."
        )
    shares, of_weights = ({}, []) if weights is None else _shares_of(list(sensitivities), weights)
    if problems + of_weights:
        raise ValueError("\n".join(problems + of_weights))
    return shares


def _shares_of(names: list[str], weights: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Returns each group's share of the budget, and what is wrong with the weights."""
    problems = [
        f"the weight of {pattern!r} is {weight}; a group without a share needs infinite noise.\n"
        "  HINT: weights are positive numbers that sum to 1."
        for pattern, weight in weights.items()
        if not (math.isfinite(weight) and weight > 0)
    ]
    total = math.fsum(weights.values())
    if not problems and abs(total - 1) > 1e-9:
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


# ---- noise


def check_request(step: int, rank: int, world_size: int, mode: str, digest: bytes) -> None:
    """Raises ValueError, with every reason, if noise for this step and process cannot be private."""
    problems = []
    if step < 0:
        problems.append(f"step is {step}; steps count from 0.")
    if not 0 <= rank < world_size:
        problems.append(f"rank is {rank} in a world of {world_size}; the shares would not add up.")
    if mode not in get_args(Mode):
        problems.append(f"mode is {mode!r}; it is one of {', '.join(get_args(Mode))}.")
    if len(digest) < _MINIMAL_DIGEST:
        problems.append(
            f"the state digest has {len(digest)} bytes; without it a changed replay repeats the noise of this "
            "step, and the difference of the two releases is free of noise."
        )
    if problems:
        hint = "HINT: pass state_digest(weights, plan digest, ...), the process's rank and the world size."
        raise ValueError("\n".join([*problems, hint]))


def deviations_without_bound(deviations: Sequence[float]) -> ValueError:
    """Returns the error for noise whose deviation is not finite and at least 0."""
    wrong = [f"{j}: {value}" for j, value in enumerate(deviations) if not (math.isfinite(value) and value >= 0)]
    return ValueError(
        f"noise needs a finite deviation >= 0, and some sums have another ({', '.join(wrong)}).\n"
        "HINT: take the deviations from the certificate that the sums were computed under."
    )
