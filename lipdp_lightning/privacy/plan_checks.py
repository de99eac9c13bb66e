"""Everything that is wrong with a plan, all at once, each with its reason and fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lipdp_lightning.accounting.events import LARGEST, SMALLEST, SMALLEST_DELTA, size_problems

if TYPE_CHECKING:
    from lipdp_lightning.privacy.plan import PrivacyPlan

CHOICES = {
    "adjacency": ("add_remove", "replace_one"),
    "accountant": ("pld", "prv", "rdp"),
    "unit": ("example", "group"),
    "scaling": (
        *("worst_case", "layerwise", "joint", "radius", "exact", "exact_layerwise", "batch_max"),
        *("clip_flat", "clip_per_layer", "clip_ghost", "none"),
    ),
    "allocation": ("equal", "global", "optimal", "custom"),
    "projection": ("clip", "clip_singular", "fixed", "bjorck", "frobenius"),
    "standardize": ("none", "mean", "mean_and_variance"),
}
WITH_RADIUS = ("radius", "exact", "exact_layerwise")


CLIPPINGS = ("local", "global", "automatic")
SWITCHABLE = ("worst_case", "layerwise", "joint")


def plan_problems(plan: PrivacyPlan) -> list[str]:
    """One text per problem, a HINT line in each; empty if the plan is sound."""
    return [f"{problem}\nHINT: {hint}" for check in _CHECKS for problem, hint in check(plan)]


Problems = Iterator[tuple[str, str]]


def _choices(plan: PrivacyPlan) -> Problems:
    for name, allowed in CHOICES.items():
        value = getattr(plan, name)
        if value not in allowed:
            yield f"{name} {value!r} is unknown.", f"one of {', '.join(allowed)}."
    if plan.sampling != "poisson":
        yield (
            f"sampling {plan.sampling!r}: the accountants assume that each example is drawn independently at each "
            "step, which shuffled or fixed-size batches do not do; the epsilon would be that of another algorithm.",
            "sampling='poisson', the only one there is; batches vary in size around expected_batch_size.",
        )
    for name in ("secure", "allow_noncertified"):
        if not isinstance(getattr(plan, name), bool):
            yield f"{name} {getattr(plan, name)!r} is not true or false.", f"{name}=false"


def _constants(plan: PrivacyPlan) -> Problems:
    for name in ("dataset_size", "steps", "max_examples_per_unit"):
        if not _is_count(getattr(plan, name)):
            yield f"{name} {getattr(plan, name)!r} is not a positive whole number.", f"declare {name} as a constant."
    batch = plan.expected_batch_size
    if not _is_positive(batch):
        yield f"expected_batch_size {batch!r} is not a positive number.", "256, for example."
    elif _is_count(plan.dataset_size) and batch > plan.dataset_size:
        yield (
            f"expected_batch_size {batch} exceeds dataset_size {plan.dataset_size}: the sample rate would be above 1.",
            "at most the dataset size, which makes every step use every example.",
        )
    sigma = plan.noise_multiplier
    if not (_is_number(sigma) and sigma >= 0):
        yield f"noise_multiplier {sigma!r} is not a finite number >= 0.", "about 1, or give epsilon to create()."
    elif sigma == 0 and not plan.allow_noncertified:
        yield (
            "noise_multiplier 0 publishes the data's gradients: no epsilon exists.",
            "allow_noncertified=true, in tests.",
        )
    if _is_count(plan.steps) and _is_count(plan.dataset_size) and _is_positive(batch):
        yield from size_problems(plan.dataset_size, batch, plan.steps)
    if _is_number(plan.delta) and 0 < plan.delta < SMALLEST_DELTA:
        yield f"delta {plan.delta!r} is below {SMALLEST_DELTA:.0e}, which no accountant can tell from 0.", "1e-6."
    if not (_is_number(plan.delta) and 0 < plan.delta < 1):
        yield f"delta {plan.delta!r} is not in (0, 1): no Gaussian mechanism has one.", "a number well below 1/N."


def _unit(plan: PrivacyPlan) -> Problems:
    rows = plan.max_examples_per_unit
    if plan.unit == "example" and _is_count(rows) and rows > 1:
        yield (
            f"unit 'example' with max_examples_per_unit {rows}: the guarantee would be for one row only.",
            "unit='group' protects all rows of a person or an institution together.",
        )
    if _is_count(rows) and _is_count(plan.dataset_size) and rows > plan.dataset_size:
        yield f"max_examples_per_unit {rows} exceeds dataset_size.", "the largest number of rows one unit may have."


def _scaling(plan: PrivacyPlan) -> Problems:
    if plan.scaling == "batch_max" and not plan.allow_noncertified:
        yield (
            "scaling 'batch_max' divides by a maximum over the private batch: one example changes the weight of all "
            "others, and its influence exceeds the claimed bound up to 500 times.",
            "scaling='layerwise', or allow_noncertified=true to reproduce the published algorithm without guarantee.",
        )
    tracked = (plan.radius_quantile, plan.radius_noise_multiplier)
    if plan.scaling not in WITH_RADIUS:
        for name in ("radius", "radius_quantile", "radius_noise_multiplier"):
            if getattr(plan, name) is not None:
                yield f"{name} is given, but scaling is {plan.scaling!r} and would ignore it.", "scaling='radius'"
    elif (plan.radius is None) == all(value is None for value in tracked):
        yield (
            f"scaling {plan.scaling!r} needs a public radius or a privately tracked one, and not both.",
            "radius=1.0, or radius_quantile=0.5 with radius_noise_multiplier=10.",
        )
    elif plan.radius is None and any(value is None for value in tracked):
        yield (
            "a radius read from the private data without noise is not private.",
            "radius_quantile and radius_noise_multiplier together.",
        )
    quantile = plan.radius_quantile
    if quantile is not None and not (_is_number(quantile) and 0 < quantile < 1):
        yield f"radius_quantile {quantile!r} is not in (0, 1).", "0.5, the median."
    for name in ("radius", "radius_noise_multiplier", "input_bound", "loss_clip"):
        value = getattr(plan, name)
        if value is not None and not _is_positive(value):
            yield f"{name} {value!r} is not a positive finite number.", f"a public constant, or no {name}."
    if not _is_positive(plan.scaling_floor):
        yield f"scaling_floor {plan.scaling_floor!r} is not positive: it keeps 1/n finite.", "scaling_floor=1e-6"


def _patterns(plan: PrivacyPlan) -> Problems:
    if plan.max_norm is not None and not _is_positive(plan.max_norm) and not _is_table(plan.max_norm):
        yield f"max_norm {plan.max_norm!r} is no positive radius, nor (pattern, radius) pairs.", "max_norm=1.0"
    for name in ("group_weights", "cotangent_clip"):
        if not _is_table(getattr(plan, name), may_be_empty=True):
            yield f"{name} {getattr(plan, name)!r} are not (pattern, positive number) pairs.", f'{name}=[["fc*", 1.0]]'
    if not isinstance(plan.free_layers, tuple) or not all(isinstance(p, str) for p in plan.free_layers):
        yield f"free_layers {plan.free_layers!r} is not a list of patterns.", 'free_layers=["head"]'
    if plan.allocation == "custom" and not plan.group_weights:
        yield "allocation 'custom' has no group_weights.", 'group_weights=[["conv*", 1.0], ["fc*", 3.0]]'
    if plan.allocation != "custom" and plan.group_weights:
        yield f"group_weights are given, but allocation {plan.allocation!r} ignores them.", "allocation='custom'"


def _clipping(plan: PrivacyPlan) -> Problems:
    clips = str(plan.scaling).startswith("clip_")
    if clips and plan.clipping not in CLIPPINGS:
        yield f"clipping {plan.clipping!r} is unknown.", f"one of {', '.join(CLIPPINGS)}."
    if clips and not _is_positive(plan.clip_norm):
        yield (
            f"clip_norm {plan.clip_norm!r} is not a positive finite number: the noise covers that norm.",
            "clip_norm=1.0",
        )
    if not clips and (plan.clipping is not None or plan.clip_norm is not None):
        yield f"clipping and clip_norm are given, but scaling {plan.scaling!r} ignores them.", "leave them out."
    if plan.scaling == "none" and not (plan.noise_multiplier == 0 and plan.allow_noncertified):
        yield (
            "scaling 'none' bounds no example's influence, so that no noise makes it private.",
            "noise_multiplier=0 with allow_noncertified=true, for a reference without privacy.",
        )
    yield from _switch(plan, CLIPPINGS if clips else SWITCHABLE, plan.clipping if clips else plan.scaling)


def _switch(plan: PrivacyPlan, allowed: tuple[str, ...], first: Any) -> Problems:
    if plan.switch_at is None and plan.switch_to is None:
        return
    if not (_is_number(plan.switch_at) and 0 < float(plan.switch_at or 0) < 1):
        yield f"switch_at {plan.switch_at!r} is no share of the steps in (0, 1).", "0.9, the last tenth of the steps."
    if plan.switch_to not in allowed or first not in allowed:
        yield (
            f"{first!r} cannot switch to {plan.switch_to!r} during training.",
            f"both of {', '.join(allowed)}; or leave switch_at and switch_to out.",
        )


def _preliminary(plan: PrivacyPlan) -> Problems:
    if not _is_table(plan.preliminary, may_be_empty=True):
        yield (
            f"preliminary {plan.preliminary!r} are not (label, noise multiplier) pairs with positive multipliers: a "
            "statistic of private rows without noise is not private.",
            'preliminary=[["mean", 10.0]]',
        )
        return
    labels = [label for label, _ in plan.preliminary]
    if len(set(labels)) < len(labels) or not all(labels):
        yield f"the statistics {labels} share a label, or have none.", "one label for each release."


def _range(plan: PrivacyPlan) -> Problems:
    """Positive constants whose products would be lost in the arithmetic."""
    plain = ("noise_multiplier", "radius", "radius_noise_multiplier", "input_bound", "loss_clip", "clip_norm")
    given = [(name, getattr(plan, name)) for name in (*plain, "scaling_floor", "max_norm")]
    for name in ("max_norm", "group_weights", "cotangent_clip", "preliminary"):
        if _is_table(table := getattr(plan, name)):
            given += [(f"{name} {pattern!r}", value) for pattern, value in table]
    for name, value in given:
        if _is_positive(value) and not SMALLEST <= value <= LARGEST:
            yield f"{name} {value!r} is outside [{SMALLEST:.0e}, {LARGEST:.0e}]: float32 would lose it.", "about 1."


_CHECKS = (_choices, _constants, _unit, _scaling, _patterns, _clipping, _preliminary, _range)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_table(value: Any, may_be_empty: bool = False) -> bool:
    return (
        isinstance(value, tuple)
        and (may_be_empty or len(value) > 0)
        and all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) and _is_positive(p[1]) for p in value)
    )
