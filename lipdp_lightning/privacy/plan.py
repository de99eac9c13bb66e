"""The one frozen plan of a run: what the sampler draws, the mechanism adds and the accountant counts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..accounting.events import GAUSSIAN, SUBSAMPLED_GAUSSIAN, LedgerEntry, join_noise_multipliers
from ..budget.plan_request import PlanRequest
from . import plan_parts as parts
from .plan_parts import normalised, plan_problems

PARTS = ("influence", "shares", "constraint")


class DeltaWarning(UserWarning):
    """Warns that publishing a random record outright would satisfy such a large delta."""


class NonCertifiedWarning(UserWarning):
    """Warns that the plan has no guarantee, and no epsilon."""


@dataclass(frozen=True)
class PrivacyPlan:
    """Holds every public constant that the guarantee depends on (docs/guarantee.md, sections 1.1 and 1.6).

    `create` and `from_dict` make a plan from flat options. Equal plans have equal digests; sampler, mechanism and
    accountant compare theirs in set-up.

    Attributes:
        dataset_size: the declared size N, not read from the data, since neighbouring data sets differ in size.
        expected_batch_size: the declared mean size of a step's Poisson sample, by which released sums are divided.
        steps: the planned number of steps.
        noise_multiplier: the sigma of the joint condition sum_k ||c_ik g_ik||^2 / sigma_k^2 <= 1 / sigma^2.
        delta: the delta of the guarantee.
        influence: how the influence of one example on a step is limited; by default, set-up decides from the
            certificate of the network. A tracked radius is estimated from the step's
            sample with its own noise, which makes the step one release of a smaller, joined noise multiplier.
        shares: how the noise is shared among the groups of parameters.
        constraint: the constraint that the weights meet after every step.
        adjacency: `add_remove` or `replace_one`.
        accountant: `pld`, `prv` or `rdp`.
        unit: the protected unit: an `example`, or a `group` of at most ``max_examples_per_unit`` rows.
        input_bound: the bound on every input's norm; None leaves it to the module.
        loss_clip: the norm to which each example's loss gradient is clipped.
        cotangent_clip: (pattern of modules, radius) pairs; the cotangents at these modules' outputs are clipped.
        preliminary: (label, noise multiplier) of statistics of all rows that are released once, before the first
            step (privacy/statistics.py). Epsilon is that of statistics and steps together.
        secure: whether the noise of every coordinate is a sum of four draws.
        allow_noncertified: whether a plan without a guarantee is accepted.

    Example:
        >>> PrivacyPlan(60000, 256, 14062, 1.1, 1e-6, influence=ExampleNorms("exact", PublicRadius(1.0)))
        >>> PrivacyPlan.create(dataset_size=60000, expected_batch_size=256, epochs=60, epsilon=3, delta=1e-6)
    """

    dataset_size: int
    expected_batch_size: float
    steps: int
    noise_multiplier: float
    delta: float
    influence: parts.Influence = field(default_factory=parts.Automatic)
    shares: parts.Shares | parts.CustomShares | parts.Unsettled = field(default_factory=parts.Unsettled)
    constraint: parts.Constraint = field(default_factory=parts.Constraint)
    adjacency: str = "add_remove"
    accountant: str = "pld"
    unit: str = "example"
    max_examples_per_unit: int = 1
    input_bound: float | None = None
    loss_clip: float | None = None
    cotangent_clip: parts.Table = ()
    preliminary: parts.Table = ()
    secure: bool = False
    sampling: str = "poisson"
    allow_noncertified: bool = False

    def __post_init__(self) -> None:
        options = _checked(self.to_dict())
        for name, value in parts.parts_of(options).items():
            object.__setattr__(self, name, value)
        if self.delta >= 1 / self.dataset_size:
            warnings.warn(
                f"delta {self.delta:g} >= 1/N = {1 / self.dataset_size:.3g}: it permits publishing one record "
                "outright.\nHINT: choose a delta well below 1/N, for example 1/(10 N).",
                DeltaWarning,
                stacklevel=3,
            )
        if not self.certified:
            reason = "scaling 'batch_max' looks at the whole batch" if self.noise_multiplier else "there is no noise"
            warnings.warn(f"{reason}: this run is not private.", NonCertifiedWarning, stacklevel=3)

    @classmethod
    def create(
        cls,
        *,
        dataset_size: int,
        expected_batch_size: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        delta: float | None = None,
        **options: Any,
    ) -> PrivacyPlan:
        """Returns a plan from flat options.

        Args:
            dataset_size: the declared number of rows.
            expected_batch_size: the mean size of a step's sample.
            epsilon: the target of the whole run, to which the noise is calibrated.
            noise_multiplier: the noise multiplier; give either this or epsilon.
            epochs: expected passes over the data; steps = ceil(epochs * dataset_size / expected_batch_size).
            steps: the number of steps; give either this or epochs.
            delta: by default 1/N, which is the most that can be justified, and causes a DeltaWarning.
            **options: other keys of `to_dict`, as in the ``privacy`` group of a configuration.

        Raises:
            ValueError: if the options have problems; it lists all of them, each with a HINT.
        """
        asked = PlanRequest(dataset_size, expected_batch_size, epsilon, noise_multiplier, epochs, steps, delta)
        return asked.plan(cls.from_dict, options, OPTIONS)

    @property
    def sample_rate(self) -> float:
        """The probability q with which each example is in a step's sample."""
        return self.expected_batch_size / self.dataset_size

    @property
    def scaling(self) -> str:
        """The user's name for the form of ``influence``."""
        return self.influence.name

    @property
    def certified(self) -> bool:
        """Returns whether a guarantee exists; it does not for `batch_max`, without any bound, or without noise."""
        return not isinstance(self.influence, parts.BatchMaximum | parts.Unlimited) and self.noise_multiplier > 0

    @property
    def clips_examples(self) -> bool:
        """Returns whether the guarantee rests on clipping each example's gradient, and not on bounds of the network."""
        return isinstance(self.influence, parts.ClippedExamples)

    @property
    def is_settled(self) -> bool:
        """Returns whether the plan names its scaling, and does not leave it to the certificate of a network."""
        return not isinstance(self.influence, parts.Automatic)

    @property
    def first_switched_step(self) -> float:
        """The first step after the switch of ``influence``; infinity if there is no switch."""
        switch = getattr(self.influence, "switch", None)
        return math.inf if switch is None else math.ceil(switch.at * self.steps)

    def influence_at(self, step: int) -> parts.Influence:
        """Returns how the influence of one example is limited at a step; the value has no switch."""
        switched = step >= self.first_switched_step
        match self.influence:
            case parts.CertifiedBounds(name=name, switch=parts.Switch(to=to)) as bounds:
                return dataclasses.replace(bounds, name=to if switched else name, switch=None)
            case parts.ClippedExamples(clipping=clipping, switch=parts.Switch(to=to)) as clipped:
                return dataclasses.replace(clipped, clipping=to if switched else clipping, switch=None)
        return self.influence

    @property
    def radius_noise_multiplier(self) -> float | None:
        """The noise multiplier of the votes on a tracked radius; None if no radius is tracked."""
        match self.influence:
            case parts.ExampleNorms(radius=parts.TrackedRadius(noise_multiplier=noise)):
                return noise
        return None

    @property
    def step_noise_multiplier(self) -> float:
        """The noise multiplier of everything that one step releases: the sum, and votes on a radius if any."""
        votes = self.radius_noise_multiplier
        return self.noise_multiplier if votes is None else join_noise_multipliers((self.noise_multiplier, votes))

    def step_event(self) -> LedgerEntry:
        """Returns the ledger's entry for one step."""
        mechanism = GAUSSIAN if self.sample_rate == 1 else SUBSAMPLED_GAUSSIAN
        label = "gradient" if self.radius_noise_multiplier is None else "gradient and radius"
        return LedgerEntry(mechanism, self.step_noise_multiplier, self.sample_rate, 1, label)

    def preliminary_events(self) -> tuple[LedgerEntry, ...]:
        """Returns the ledger's entries before the first step: a Gaussian mechanism for each statistic."""
        return tuple(LedgerEntry(GAUSSIAN, level, 1.0, 1, label) for label, level in self.preliminary)

    def events(self, steps: int | None = None) -> tuple[LedgerEntry, ...]:
        """Returns the ledger of the planned run, or of a run of so many steps."""
        count = self.steps if steps is None else steps
        taken = (dataclasses.replace(self.step_event(), count=count),) if count else ()
        return (*self.preliminary_events(), *taken)

    def to_dict(self) -> dict[str, Any]:
        """Returns the flat options, plain values; `from_dict` of them, also after JSON, is an equal plan."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in PARTS}
        options = normalised(own | parts.flat_options(self.influence, self.shares, self.constraint))
        return {name: _plain(value) for name, value in options.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Returns the plan of flat options, the inverse of `to_dict`.

        Raises:
            ValueError: if a key is unknown (a constant of the guarantee would be dropped) or missing, or if values have
                problems; it lists all of them.
        """
        if wrong := sorted(set(values) - set(OPTIONS)):
            raise ValueError(f"unknown plan keys {', '.join(wrong)}.\nHINT: the options are {', '.join(OPTIONS)}.")
        if missing := _OWN.keys() - _DEFAULTS.keys() - values.keys():
            raise ValueError(f"plan keys {', '.join(sorted(missing))} are missing.\nHINT: they have no default.")
        return cls(**parts.parts_of(_checked(_DEFAULTS | dict(values))))

    def digest(self) -> bytes:
        """Returns the SHA-256 hash of the canonical JSON (sorted keys, floats in shortest exact form)."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).digest()


_OWN = {f.name: f.default for f in dataclasses.fields(PrivacyPlan) if f.name not in PARTS}
_DEFAULTS = {name: value for name, value in _OWN.items() if value is not dataclasses.MISSING} | dict(parts.FLAT)
OPTIONS = tuple(sorted({*_OWN, *_DEFAULTS}))
"""The names of a plan's flat options."""


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in the one form that is hashed; raises ValueError with all of their problems."""
    options = normalised(options)
    if problems := plan_problems(options):
        raise ValueError("\n".join(problems))
    return options


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
