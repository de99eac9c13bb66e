"""Searches for the neighbouring pair that moves the released sum most, and tests that others' contributions stay.

The condition of docs/guarantee.md, section 1.1, is sum_k ||shift_k||^2 / sigma_k^2 <= 1 / sigma^2 for every pair of
batches that differ in one example. A search can prove it false but never true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attack import attack
from .findings import Curve, Finding, PlotData, verdict
from .starts import alternative_targets, target_source, to_boundary
from .subject import Batch, Example, Subject

TOLERANCE = 1e-3  # two releases are subtracted that were rounded to float32 together with their noise


@dataclass(frozen=True)
class Worst:
    """The largest ratios found; ``pair`` is a batch and the example whose presence moves it most."""

    joint: float
    groups: dict[str, float]
    pair: tuple[Batch, Example]
    tried: int


def search_neighbours(
    subject: Subject, *, restarts: int = 16, steps: int = 20, climbs: int = 60, seed: int = 0
) -> Worst:
    """Tries witnesses of the attack on the certificate and extreme inputs with every label, then climbs from the best.

    Each candidate is added to an empty batch, to one of small examples and to one of mixed sizes. The joint ratio is
    the square root of sigma^2 sum_k ||shift_k||^2 / sigma_k^2; that of a group is ||shift_k|| over its claimed
    sensitivity.
    """
    batches = base_batches(subject, seed)
    bases = [subject.release(batch) for batch in batches]
    best = Worst(0.0, dict.fromkeys((name for name, _ in subject.groups), 0.0), (batches[0], _zero(subject)), 0)
    for example in candidates(subject, restarts, steps, seed):
        best = _better(subject, best, batches, bases, example)
    generator = torch.Generator().manual_seed(seed)
    size = 0.5
    for _ in range(climbs):
        x, y = best.pair[1]
        move = to_boundary(torch.randn((1, *x.shape), generator=generator), size * float(x.norm()))[0].to(x.dtype)
        moved = to_boundary((x + move).unsqueeze(0), subject.module.input_bound)[0]
        found = _better(subject, best, batches, bases, (moved, y))
        size = size * (1.2 if found.joint > best.joint else 0.95)
        best = found
    return best


def _better(
    subject: Subject, best: Worst, batches: Sequence[Batch], bases: Sequence[Tensor], example: Example
) -> Worst:
    sensitivities, sigma = subject.mechanism.sensitivities(), subject.plan.noise_multiplier
    joint, pair, groups = best.joint, best.pair, dict(best.groups)
    for batch, base in zip(batches, bases, strict=True):
        shift = subject.shift(batch, example, base=base)
        reached = float(subject.whitened(shift).norm()) * sigma
        for name, part in subject.by_group(shift).items():
            size = float(part.norm())
            claimed = sensitivities[name]
            groups[name] = max(groups[name], size / claimed if claimed > 0 else (torch.inf if size > 1e-6 else 0.0))
        if reached > joint:
            joint, pair = reached, (batch, example)
    return Worst(joint, groups, pair, best.tried + len(batches))


def base_batches(subject: Subject, seed: int) -> list[Batch]:
    size = int(min(64, max(2, subject.plan.expected_batch_size)))
    return [
        subject.nothing(),
        subject.examples(size, seed, largest=0.05),
        _aligned(subject, size, seed),
        subject.examples(size, seed + 1),
    ]


def _aligned(subject: Subject, size: int, seed: int) -> Batch:
    """Returns small examples that pull the same way, so that rescaling them all moves their whole sum."""
    x, y, ids = subject.examples(size, seed, largest=0.05)
    return x[:1].expand(x.shape).contiguous(), y[:1].expand(y.shape).contiguous(), ids


def _zero(subject: Subject) -> Example:
    x, y, _ = subject.examples(1)
    return torch.zeros_like(x[0]), y[0]


def candidates(subject: Subject, restarts: int, steps: int, seed: int) -> list[Example]:
    bound, loss, shape = subject.module.input_bound, subject.plain_loss, subject.output_shape
    found: list[Example] = [_zero(subject)]
    if restarts and not subject.plan.clips_examples:  # a plan that clips examples has no certificate to attack
        report = attack(
            subject.module.network, subject.input_shape, bound, loss, restarts=restarts, steps=steps, seed=seed
        )  # fmt: skip
        for claim, (x, y) in report.witnesses.items():
            if claim.startswith(("group", "joint", "loss")):
                found.append((x.float(), y.float() if y.is_floating_point() else y))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((2, *subject.input_shape), generator=generator)
    starts = to_boundary(torch.cat([torch.ones(1, *subject.input_shape), noise]), bound)
    starts = torch.cat([starts, 0.02 * starts[:1]])
    draw = target_source(loss, shape)
    for targets in alternative_targets(loss, shape, draw, len(starts), generator):
        found += [(x, y.float() if y.is_floating_point() else y) for x, y in zip(starts, targets, strict=True)]
    return found


def neighbours_finding(subject: Subject, worst: Worst) -> Finding:
    """Reports the joint ratio and those of groups; a group has a claim of its own only if the scaling bounds it by
    itself.
    """
    separate = not subject.joint
    top = max(worst.groups.values()) if separate else 0.0
    factor = max(worst.joint, top)
    broken = not factor <= 1 + TOLERANCE
    groups = ", ".join(f"{name} {ratio:.3f}" for name, ratio in worst.groups.items())
    text = (
        f"Of {worst.tried} neighbouring pairs, the worst moves the released sum by {worst.joint:.3f} times the claim; "
        f"by group: {groups}."
    )
    names = list(worst.groups)
    plot = PlotData(
        "Largest shift over its claim", "group", "measured / claimed",
        (
            Curve("joint", [0], [worst.joint], "bars"),
            Curve("groups", list(range(1, len(names) + 1)), list(worst.groups.values()), "bars"),
        ),
        "First bar: all groups together. Above 1 the noise does not cover one example.",
    )  # fmt: skip
    values = {"joint": worst.joint, "groups": worst.groups, "pairs_tried": worst.tried}
    return Finding(
        "neighbours", "Does one example move the released sum further than its noise covers?", verdict(broken), text,
        factor=factor, values=values, plots=(plot,),
    )  # fmt: skip


def interaction_finding(subject: Subject, *, count: int = 8, seed: int = 0) -> Finding:
    """Tests that the contribution of all others stays the same when an example of large norm joins a batch.

    The factor is the largest ||shift in batch A - shift alone||, whitened, times sigma.
    """
    sigma, bound = subject.plan.noise_multiplier, subject.module.input_bound
    batches = base_batches(subject, seed)
    bases = [subject.release(batch) for batch in batches]
    x, y, _ = subject.examples(count, seed + 2)
    sizes = torch.linspace(0.05, 1.0, count)
    measured = []
    for row, label, size in zip(x, y, sizes, strict=True):
        example = to_boundary(row.unsqueeze(0), float(size) * bound)[0], label
        shifts = [subject.shift(batch, example, base=base) for batch, base in zip(batches, bases, strict=True)]
        measured.append(max(float(subject.whitened(s - shifts[0]).norm()) * sigma for s in shifts[1:]))
    factor = max(measured)
    broken = not factor <= TOLERANCE
    text = (
        f"What an example adds to the sum differs between batches by {factor:.2g} times the claimed sensitivity; "
        + ("the contributions of others change with it." if broken else "that is rounding.")
    )
    plot = PlotData(
        "Effect on the contributions of others", "norm of the added example / input bound", "in units of the claim",
        (Curve("measured", sizes.tolist(), measured, "points"),),
        "A factor that looks at the whole batch, a mean, or statistics of the batch show here.",
    )  # fmt: skip
    return Finding(
        "scaling", "Does one example's norm change what the others contribute?", verdict(broken), text,
        factor=factor, values={"tolerance": TOLERANCE, "largest": factor}, plots=(plot,),
    )  # fmt: skip
