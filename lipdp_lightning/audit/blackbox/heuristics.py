"""Chooses values of the bound and of the noise multiplier at which the noise is visible (paper 002, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

from .black_box import Checkpoint, Data, HyperParameters, Implementation

BOUNDS = tuple(10.0**k for k in range(-2, 7))
MULTIPLIERS = tuple(10.0**k for k in range(-8, 2))
_STABLE = 1e-3  # relative difference of two changes of the loss
_VISIBLE = 1e-2


def loss_changes(
    implementation: Implementation, start: Checkpoint, hypers: Sequence[HyperParameters], data: Data
) -> list[float]:
    """Returns the change of the loss by one training run from the same checkpoint, for each setting.

    The loss is always evaluated under the largest bound, so that the settings differ in their training alone.
    """
    after = [(implementation.train(data, hyper, start), hyper.but(bound=max(BOUNDS))) for hyper in hypers]
    return [implementation.loss(a, data, h) - implementation.loss(start, data, h) for a, h in after]


def choose_bound(
    implementation: Implementation, hyper: HyperParameters, *, size: int = 16, trials: int = 2,
    bounds: Sequence[float] = BOUNDS,
) -> float:  # fmt: skip
    """Returns C*, beyond which the change of the loss no longer depends on C; the largest over the trials."""
    chosen = []
    for trial in range(trials):
        data = implementation.problem.draw(size, trial)
        start = implementation.warmed(hyper.but(bound=max(bounds)), data)
        quiet = hyper.but(noise_multiplier=0.0, steps=1)
        changes = loss_changes(implementation, start, [quiet.but(bound=c) for c in bounds], data)
        last = changes[-1]
        stable = len(bounds) - 1
        while stable > 0 and abs(changes[stable - 1] - last) <= _STABLE * abs(last):
            stable -= 1
        chosen.append(bounds[stable])
    return max(chosen)


def choose_noise(
    implementation: Implementation, hyper: HyperParameters, bound: float, *, size: int = 16, trials: int = 2,
    multipliers: Sequence[float] = MULTIPLIERS,
) -> float:  # fmt: skip
    """Returns sigma*, from which the noise changes the loss visibly; the smallest over the trials, 0 if none does."""
    chosen = []
    for trial in range(trials):
        data = implementation.problem.draw(size, trial)
        start = implementation.warmed(hyper.but(bound=bound), data)
        one = hyper.but(bound=bound, steps=1, seed=trial)
        quiet, *noisy = loss_changes(
            implementation, start, [one.but(noise_multiplier=s) for s in (0.0, *multipliers)], data
        )
        visible = [abs(change - quiet) > _VISIBLE * abs(quiet) for change in noisy]
        first = len(visible)
        while first > 0 and visible[first - 1]:
            first -= 1
        chosen.append(multipliers[first] if first < len(visible) else 0.0)
    return min(chosen)
