"""The parts of a plan that come in several forms, its flat options, and everything that is wrong with these.

Options which exclude each other cannot be combined in parts:

* ``Influence``: how the influence of one example on a step is limited. ``CertifiedBounds``, ``ExampleNorms`` and
  ``ClippedExamples`` are private; ``BatchMaximum`` and ``Unlimited`` are not.
* ``Shares`` or ``CustomShares``: how the noise is shared among the groups of parameters.
* ``Constraint``: how the weights are constrained after every step.
* ``Automatic`` and ``Unsettled``: what is left to the certificate of the network, before a run is set up.

Users and files give a plan as flat options instead (YAML, command line, `PrivacyPlan.create`, plan.json, digests).
``parts_of`` and ``flat_options`` are the one place that turns these into parts and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar

from ..accounting.accountants import ACCOUNTANTS, ADJACENCIES
from ..accounting.events import LARGEST, SMALLEST, SMALLEST_DELTA, is_number, is_positive, size_problems

BoundsName = Literal["worst_case", "layerwise", "joint"]
Clipping = Literal["local", "global", "automatic"]
Name = TypeVar("Name", bound=str)
Table = tuple[tuple[str, float], ...]
"""(pattern of names, number) pairs; the first pattern that matches counts."""


@dataclass(frozen=True)
class Switch(Generic[Name]):
    """A change to the bounds or the clipping function ``to``, after the share ``at`` of the steps."""

    at: float
    to: Name


@dataclass(frozen=True)
class PublicRadius:
    """A radius that is declared."""

    value: float


@dataclass(frozen=True)
class TrackedRadius:
    """A radius that follows a quantile of the step's norms, estimated by votes with noise of their own."""

    quantile: float
    noise_multiplier: float


@dataclass(frozen=True)
class CertifiedBounds:
    """The bounds of the network limit every example; no factor divides by less than ``floor``."""

    name: BoundsName = "joint"
    floor: float = 1e-6
    switch: Switch[BoundsName] | None = None


@dataclass(frozen=True)
class ExampleNorms:
    """Each example's own norms are compared with a radius."""

    name: Literal["radius", "exact", "exact_layerwise"]
    radius: PublicRadius | TrackedRadius
    floor: float = 1e-6


@dataclass(frozen=True)
class ClippedExamples:
    """The function ``clipping`` clips each example's gradient to ``norm``; no bound of the network is used."""

    name: Literal["clip_flat", "clip_per_layer", "clip_ghost"]
    clipping: Clipping
    norm: float
    switch: Switch[Clipping] | None = None


@dataclass(frozen=True)
class BatchMaximum:
    """Division by a maximum over the private batch, thesis Algorithm 8 as printed. It is not private."""

    name: Literal["batch_max"] = "batch_max"


@dataclass(frozen=True)
class Unlimited:
    """Nothing limits an example, for a run without noise. It is not private."""

    name: Literal["none"] = "none"


@dataclass(frozen=True)
class Automatic:
    """Leaves the choice between ``joint`` and ``exact`` to set-up; ``radius`` is that of ``exact``."""

    radius: float | None = None
    floor: float = 1e-6
    name: Literal["auto"] = "auto"


@dataclass(frozen=True)
class Unsettled:
    """Follows from the scaling, once this is settled."""


Influence = CertifiedBounds | ExampleNorms | ClippedExamples | BatchMaximum | Unlimited | Automatic


@dataclass(frozen=True)
class Shares:
    """A rule shares the noise among the groups of parameters."""

    rule: Literal["equal", "global", "optimal"] = "optimal"


@dataclass(frozen=True)
class CustomShares:
    """Declared weights share the noise among the groups of parameters."""

    weights: Table
    rule: Literal["custom"] = "custom"


@dataclass(frozen=True)
class NormBalls:
    """Every layer is projected onto its norm ball; ``max_norm`` is one radius, or (pattern, radius) pairs."""

    projection: Literal["clip", "clip_singular", "fixed", "bjorck", "frobenius"] = "clip"
    max_norm: float | Table = 1.0


@dataclass(frozen=True)
class Constraint:
    """The constraint that the weights meet after every step.

    Attributes:
        balls: the norm balls of the layers; None leaves every layer free.
        free_layers: patterns of layers that are not constrained.
        standardize: whether the mean of every kernel of a convolution is removed, and norms are equalised.
    """

    balls: NormBalls | Unsettled | None = Unsettled()
    free_layers: tuple[str, ...] = ()
    standardize: Literal["none", "mean", "mean_and_variance"] = "none"


FLAT: Mapping[str, Any] = {
    "scaling": "auto", "scaling_floor": 1e-6, "radius": None, "radius_quantile": None, "radius_noise_multiplier": None,
    "clipping": None, "clip_norm": None, "switch_at": None, "switch_to": None, "allocation": "auto",
    "group_weights": (), "projection": "clip", "max_norm": "auto", "free_layers": (), "standardize": "none",
}  # fmt: skip
"""The flat options that the parts hold, with their defaults."""


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flat options with what is `auto` decided, unless the scaling itself is left open."""
    chosen = dict(options)
    if chosen["max_norm"] == "auto" and (chosen["scaling"] != "auto" or chosen["projection"] != "clip"):
        chosen["max_norm"] = 1.0  # a projection that is named is wanted, whatever the scaling
    if chosen["allocation"] == "auto" and chosen["scaling"] != "auto":
        chosen["allocation"] = "optimal"
    return chosen


def parts_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `PrivacyPlan` for flat options that are complete and have no problems.

    Example:
        >>> parts_of({**FLAT, "scaling": "exact", "radius": 1.0})["influence"]
        ExampleNorms(name='exact', radius=PublicRadius(value=1.0), floor=1e-06)
    """
    rule, max_norm = options["allocation"], options["max_norm"]
    balls: NormBalls | Unsettled | None = None
    if max_norm is not None:
        balls = Unsettled() if max_norm == "auto" else NormBalls(options["projection"], max_norm)
    shares: Shares | CustomShares | Unsettled = Unsettled() if rule == "auto" else Shares(rule)
    if rule == "custom":
        shares = CustomShares(options["group_weights"])
    return {name: value for name, value in options.items() if name not in FLAT} | {
        "influence": _influence(options),
        "shares": shares,
        "constraint": Constraint(balls, options["free_layers"], options["standardize"]),
    }


def _influence(options: Mapping[str, Any]) -> Influence:
    name, floor, radius = options["scaling"], options["scaling_floor"], options["radius"]
    switch = None if options["switch_at"] is None else Switch(options["switch_at"], options["switch_to"])
    if name in CLIPPED:
        return ClippedExamples(name, options["clipping"], options["clip_norm"], switch)
    if name in WITH_RADIUS:
        tracked = TrackedRadius(options["radius_quantile"], options["radius_noise_multiplier"])
        return ExampleNorms(name, tracked if radius is None else PublicRadius(radius), floor)
    if name == "auto":
        return Automatic(radius, floor)
    if name in SWITCHABLE:
        return CertifiedBounds(name, floor, switch)
    return BatchMaximum() if name == "batch_max" else Unlimited()


_OPTION_OF = {
    "name": "scaling", "floor": "scaling_floor", "value": "radius", "quantile": "radius_quantile",
    "noise_multiplier": "radius_noise_multiplier", "norm": "clip_norm", "switch": "switch_at", "at": "switch_at",
    "to": "switch_to", "rule": "allocation", "weights": "group_weights", "balls": "max_norm",
}  # fmt: skip
"""The flat options that fields of parts hold, where their names differ; a part that is left out is None."""


def flat_options(*given: Influence | Shares | CustomShares | Unsettled | Constraint) -> dict[str, Any]:
    """Returns the flat options of the parts; the inverse of ``parts_of``."""
    return {**FLAT, **dict(_held(given))}


def _held(given: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the options that parts hold; those of parts within parts, too."""
    for part in given:
        for name, value in vars(part).items():
            if is_dataclass(value):
                yield from _held([value])
            else:
                yield _OPTION_OF.get(name, name), value


# ---- what is wrong with flat options

SWITCHABLE = ("worst_case", "layerwise", "joint")
WITH_RADIUS = ("radius", "exact", "exact_layerwise")
CLIPPED = ("clip_flat", "clip_per_layer", "clip_ghost")
CLIPPINGS = ("local", "global", "automatic")
CHOICES = {
    "adjacency": ADJACENCIES,
    "accountant": ACCOUNTANTS,
    "unit": ("example", "group"),
    "scaling": ("auto", *SWITCHABLE, *WITH_RADIUS, "batch_max", *CLIPPED, "none"),
    "allocation": ("auto", "equal", "global", "optimal", "custom"),
    "projection": ("clip", "clip_singular", "fixed", "bjorck", "frobenius"),
    "standardize": ("none", "mean", "mean_and_variance"),
}
_TABLES = ("group_weights", "cotangent_clip", "preliminary")
_POSITIVE = {  # options that must be positive, with a reason that is not obvious, if any, and a hint
    "radius": ("", "give a public constant, or no radius."),
    "radius_noise_multiplier": ("", "give a public constant, or no radius_noise_multiplier."),
    "input_bound": ("", "give a public constant, or no input_bound."),
    "loss_clip": ("", "give a public constant, or no loss_clip."),
    "clip_norm": (": the noise covers that norm", "use clip_norm=1.0."),
    "scaling_floor": (": it keeps 1/n finite", "use scaling_floor=1e-6."),
}
_FLOATS = (*_POSITIVE, "noise_multiplier", "delta", "radius_quantile", "switch_at", "max_norm")


def normalised(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in the one form that is hashed, from what YAML and JSON may bring.

    Lists and mappings become tuples, and whole numbers floats; what is `auto` becomes the default of a scaling that is
    named. Values of other types are kept; the checks refuse them.
    """
    result = with_defaults(options)
    for name in _FLOATS:
        if isinstance(result[name], int) and is_number(result[name]):
            result[name] = float(result[name])
    batch = result["expected_batch_size"]
    if isinstance(batch, float) and batch.is_integer():
        result["expected_batch_size"] = int(batch)
    for name in (*_TABLES, "max_norm"):
        items = result[name].items() if isinstance(result[name], Mapping) else result[name]
        try:
            result[name] = tuple((str(pattern), float(number)) for pattern, number in items)
        except (TypeError, ValueError, OverflowError):
            continue
    if isinstance(result["free_layers"], list):
        result["free_layers"] = tuple(result["free_layers"])
    return result


def plan_problems(options: Mapping[str, Any]) -> list[str]:
    """Returns one text with a HINT line for each problem of normalised options; the list is empty if there is none."""
    plan = SimpleNamespace(**options)
    return [f"{problem}\nHINT: {hint}" for check in _CHECKS for problem, hint in check(plan)]


Problems = Iterator[tuple[str, str]]


def _choices(plan: SimpleNamespace) -> Problems:
    for name, allowed in CHOICES.items():
        value = getattr(plan, name)
        if value not in allowed:
            yield f"{name} {value!r} is unknown.", f"use one of {', '.join(allowed)}."
    if plan.sampling != "poisson":
        yield (
            f"sampling {plan.sampling!r} is unknown: the accountants assume that each example is drawn independently "
            "at each step, unlike in shuffled or fixed-size batches; the epsilon would be that of another algorithm.",
            "use sampling='poisson', the only one that is supported; batches vary in size around expected_batch_size.",
        )
    for name in ("secure", "allow_noncertified"):
        if not isinstance(getattr(plan, name), bool):
            yield f"{name} {getattr(plan, name)!r} is not true or false.", f"use {name}=false."


def _constants(plan: SimpleNamespace) -> Problems:
    for name in ("dataset_size", "steps", "max_examples_per_unit"):
        if not _is_count(getattr(plan, name)):
            yield f"{name} {getattr(plan, name)!r} is not a positive whole number.", f"declare {name} as a constant."
    batch, size, rows = plan.expected_batch_size, plan.dataset_size, plan.max_examples_per_unit
    if not is_positive(batch):
        yield f"expected_batch_size {batch!r} is not a positive number.", "use 256, for example."
    elif _is_count(size) and batch > size:
        yield (
            f"expected_batch_size {batch} exceeds dataset_size {size}: the sample rate would be above 1.",
            "use at most the dataset size, at which every step uses every example.",
        )
    if not (is_number(plan.noise_multiplier) and plan.noise_multiplier >= 0):
        yield (
            f"noise_multiplier {plan.noise_multiplier!r} is not a finite number >= 0.",
            "use about 1, or give epsilon to create().",
        )
    if _is_count(plan.steps) and _is_count(size) and is_positive(batch):
        yield from size_problems(size, batch, plan.steps)
    if is_number(plan.delta) and 0 < plan.delta < SMALLEST_DELTA:
        yield f"delta {plan.delta!r} is below {SMALLEST_DELTA:.0e}, which no accountant can tell from 0.", "use 1e-6."
    if not (is_number(plan.delta) and 0 < plan.delta < 1):
        yield f"delta {plan.delta!r} is not in (0, 1): no Gaussian mechanism has one.", "use one well below 1/N."
    if plan.unit == "example" and _is_count(rows) and rows > 1:
        yield (
            f"unit 'example' with max_examples_per_unit {rows}: the guarantee would be for one row only.",
            "use unit='group', which protects all rows of a person or an institution together.",
        )
    if _is_count(rows) and _is_count(size) and rows > size:
        yield f"max_examples_per_unit {rows} exceeds dataset_size.", "give the largest number of rows of one unit."


def _not_private(plan: SimpleNamespace) -> Problems:
    if plan.noise_multiplier == 0 and not plan.allow_noncertified:
        yield (
            "noise_multiplier 0 publishes the data's gradients: no epsilon exists.",
            "set allow_noncertified=true, in tests.",
        )
    if plan.scaling == "batch_max" and not plan.allow_noncertified:
        yield (
            "scaling 'batch_max' divides by a maximum over the private batch: one example changes the weight of all "
            "others, and its influence exceeds the claimed bound up to 500 times.",
            "use scaling='layerwise', or allow_noncertified=true for the published algorithm without guarantee.",
        )
    if plan.scaling == "none" and not (plan.noise_multiplier == 0 and plan.allow_noncertified):
        yield (
            "scaling 'none' bounds no example's influence, so that no noise makes it private.",
            "use noise_multiplier=0 with allow_noncertified=true, for a reference without privacy.",
        )


def _exclusions(plan: SimpleNamespace) -> Problems:
    """Yields options that exclude each other."""
    tracked = ("radius_quantile", "radius_noise_multiplier")
    for name in ("radius", *tracked):
        with_radius = WITH_RADIUS if name in tracked else (*WITH_RADIUS, "auto")
        if plan.scaling not in with_radius and getattr(plan, name) is not None:
            yield f"{name} is given, but scaling is {plan.scaling!r} and would ignore it.", "use scaling='radius'."
    if plan.scaling not in CLIPPED and (plan.clipping is not None or plan.clip_norm is not None):
        yield f"clipping and clip_norm are given, but scaling {plan.scaling!r} ignores them.", "leave them out."
    missing = [getattr(plan, name) is None for name in tracked]
    if plan.scaling in WITH_RADIUS and (plan.radius is None) == all(missing):
        yield (
            f"scaling {plan.scaling!r} needs a public radius or a privately tracked one, and not both.",
            "give radius=1.0, or radius_quantile=0.5 with radius_noise_multiplier=10.",
        )
    elif plan.scaling in WITH_RADIUS and any(missing) != all(missing):
        yield (
            "a radius read from the private data without noise is not private.",
            "give radius_quantile and radius_noise_multiplier together.",
        )
    if plan.allocation == "custom" and not plan.group_weights:
        yield "allocation 'custom' has no group_weights.", 'give group_weights=[["conv*", 1.0], ["fc*", 3.0]].'
    if plan.allocation != "custom" and plan.group_weights:
        yield f"group_weights are given, but allocation {plan.allocation!r} ignores them.", "use allocation='custom'."
    clips = plan.scaling in CLIPPED
    if clips and plan.clipping not in CLIPPINGS:
        yield f"clipping {plan.clipping!r} is unknown.", f"use one of {', '.join(CLIPPINGS)}."
    allowed, first = (CLIPPINGS, plan.clipping) if clips else (SWITCHABLE, plan.scaling)
    if plan.switch_at is None and plan.switch_to is None:
        return
    if not (is_number(plan.switch_at) and 0 < plan.switch_at < 1):
        yield f"switch_at {plan.switch_at!r} is not a share of the steps in (0, 1).", "use 0.9, for the last tenth."
    if plan.switch_to not in allowed or first not in allowed:
        yield (
            f"{first!r} cannot switch to {plan.switch_to!r} during training.",
            f"use two of {', '.join(allowed)}; or leave switch_at and switch_to out.",
        )


def _numbers(plan: SimpleNamespace) -> Problems:
    """Yields constants that are not positive, or so large or small that float32 products would lose them."""
    given = [("noise_multiplier", plan.noise_multiplier)]
    for name, (reason, hint) in _POSITIVE.items():
        value = getattr(plan, name)
        given.append((name, value))
        needed = name == "scaling_floor" or (name == "clip_norm" and plan.scaling in CLIPPED)
        if (needed or value is not None) and not is_positive(value):
            yield f"{name} {value!r} is not a positive finite number{reason}.", hint
    quantile = plan.radius_quantile
    if quantile is not None and not (is_number(quantile) and 0 < quantile < 1):
        yield f"radius_quantile {quantile!r} is not in (0, 1).", "use 0.5, the median."
    for name in ("max_norm", *_TABLES):
        if _is_table(table := getattr(plan, name)):
            given += [(f"{name} {pattern!r}", value) for pattern, value in table]
    for name, value in (*given, ("max_norm", plan.max_norm)):
        if is_positive(value) and not SMALLEST <= value <= LARGEST:
            yield f"{name} {value!r} is outside [{SMALLEST:.0e}, {LARGEST:.0e}]: float32 would lose it.", "use about 1."


def _patterns(plan: SimpleNamespace) -> Problems:
    norm = plan.max_norm
    if norm not in (None, "auto") and not is_positive(norm) and not (norm and _is_table(norm)):
        yield f"max_norm {norm!r} is neither a positive radius nor (pattern, radius) pairs.", "use max_norm=1.0."
    for name in ("group_weights", "cotangent_clip"):
        if not _is_table(getattr(plan, name)):
            yield f"{name} {getattr(plan, name)!r} are not (pattern, positive number) pairs.", 'use [["fc*", 1.0]].'
    if not isinstance(plan.free_layers, tuple) or not all(isinstance(p, str) for p in plan.free_layers):
        yield f"free_layers {plan.free_layers!r} is not a list of patterns.", 'use free_layers=["head"].'
    if not _is_table(plan.preliminary):
        yield (
            f"preliminary {plan.preliminary!r} are not (label, noise multiplier) pairs with positive multipliers: a "
            "statistic of private rows without noise is not private.",
            'use preliminary=[["mean", 10.0]].',
        )
        return
    labels = [label for label, _ in plan.preliminary]
    if len(set(labels)) < len(labels) or not all(labels):
        yield f"the statistics {labels} share a label, or have none.", "give one label to each release."


_CHECKS = (_choices, _constants, _not_private, _exclusions, _numbers, _patterns)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_table(value: Any) -> bool:
    """Returns whether these are pairs of a text and a positive number, or none."""
    return isinstance(value, tuple) and all(
        isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) and is_positive(p[1]) for p in value
    )
