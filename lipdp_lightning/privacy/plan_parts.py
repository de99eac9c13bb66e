"""The parts of a plan that come in several forms, so that options which exclude each other cannot be combined.

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
from typing import Any, Generic, Literal, TypeVar

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
    if name in ("clip_flat", "clip_per_layer", "clip_ghost"):
        return ClippedExamples(name, options["clipping"], options["clip_norm"], switch)
    if name in ("radius", "exact", "exact_layerwise"):
        tracked = TrackedRadius(options["radius_quantile"], options["radius_noise_multiplier"])
        return ExampleNorms(name, tracked if radius is None else PublicRadius(radius), floor)
    if name == "auto":
        return Automatic(radius, floor)
    if name in ("worst_case", "layerwise", "joint"):
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
