"""The one frozen plan of a run: what the sampler draws, the mechanism adds and the accountant counts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lipdp_lightning.accounting.events import (
    GAUSSIAN,
    SMALLEST_EPSILON,
    SUBSAMPLED_GAUSSIAN,
    LedgerEntry,
    join_noise_multipliers,
)
from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.privacy.plan_checks import plan_problems

ADJACENCY = "add_remove"
_PAIRS = ("group_weights", "cotangent_clip", "preliminary")
_FLOATS = (
    *("noise_multiplier", "delta", "input_bound", "loss_clip", "radius", "radius_quantile"),
    *("radius_noise_multiplier", "scaling_floor", "clip_norm", "switch_at"),
)


class DeltaWarning(UserWarning):
    """delta is so large that publishing a record outright would satisfy it."""


class NonCertifiedWarning(UserWarning):
    """The plan has no guarantee; no epsilon it leads to may be called one."""


@dataclass(frozen=True)
class PrivacyPlan:
    """Every public constant the guarantee depends on (docs/guarantee.md, section 1.1 and 1.6).

    dataset_size and expected_batch_size are DECLARED, not read from the data: neighbouring data sets differ in
    size. noise_multiplier is the sigma of the joint condition sum_k ||c_ik g_ik||^2 / sigma_k^2 <= 1 / sigma^2.
    Equal plans have equal digests; sampler, mechanism and accountant compare theirs in set-up.

    max_norm is one radius for all layers, or (pattern, radius) pairs; None leaves every layer free. A radius
    scaling has a public `radius`, or tracks the quantile `radius_quantile` with its own noise on the step's
    sample, which makes the step one release of a smaller, joined noise multiplier.

    Scalings clip_* clip each example's gradient to clip_norm, by the function `clipping`, and use no bound of the
    network; the guarantee rests on the clipping then. From the share switch_at of the steps on, `switch_to` replaces
    the clipping function, or the scaling; each step stays a release of the same noise multiplier.

    preliminary are (label, noise multiplier) of statistics of all rows that are released once, before the first
    step (privacy/statistics.py). They are in the ledger: epsilon is that of statistics and steps together.
    """

    dataset_size: int
    expected_batch_size: float
    steps: int
    noise_multiplier: float
    delta: float
    adjacency: str = ADJACENCY
    accountant: str = "pld"
    unit: str = "example"
    max_examples_per_unit: int = 1
    scaling: str = "joint"
    allocation: str = "optimal"
    group_weights: tuple[tuple[str, float], ...] = ()
    projection: str = "clip"
    max_norm: float | tuple[tuple[str, float], ...] | None = 1.0
    free_layers: tuple[str, ...] = ()
    standardize: str = "none"
    input_bound: float | None = None
    loss_clip: float | None = None
    cotangent_clip: tuple[tuple[str, float], ...] = ()
    radius: float | None = None
    radius_quantile: float | None = None
    radius_noise_multiplier: float | None = None
    scaling_floor: float = 1e-6
    secure: bool = False
    sampling: str = "poisson"
    allow_noncertified: bool = False
    clipping: str | None = None
    clip_norm: float | None = None
    switch_at: float | None = None
    switch_to: str | None = None
    preliminary: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)
        problems = plan_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        if self.delta >= 1 / self.dataset_size:
            warnings.warn(
                f"delta {self.delta:g} >= 1/N = {1 / self.dataset_size:.3g}: it permits publishing one record "
                "outright.\nHINT: a delta well below 1/N, for example 1/(10 N).",
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
        """A plan from `epsilon` (the noise is calibrated) or `noise_multiplier`, and from `epochs` or `steps`.

        steps = ceil(epochs * dataset_size / expected_batch_size). delta defaults to 1/N, which is the most that
        can be justified, and draws a DeltaWarning.
        """
        from lipdp_lightning.accounting.calibrate import steps_for_epochs

        problems = []
        if (epsilon is None) == (noise_multiplier is None):
            problems.append("epsilon and noise_multiplier: exactly one is needed, the other follows.\nHINT: epsilon=3")
        if epsilon is not None and not (epsilon > 0 and math.isfinite(epsilon)):
            problems.append(f"epsilon {epsilon} is not a positive finite number.\nHINT: epsilon=3")
        elif epsilon is not None and epsilon < SMALLEST_EPSILON:
            problems.append(
                f"epsilon {epsilon} is below {upper_text(SMALLEST_EPSILON)}: noise drowns any model.\nHINT: epsilon=3"
            )
        if (epochs is None) == (steps is None):
            problems.append("epochs and steps: exactly one is needed, the other follows.\nHINT: epochs=60")
        if epochs is not None and not (epochs > 0 and math.isfinite(epochs)):
            problems.append(f"epochs {epochs} is not a positive number.\nHINT: epochs=60")
            epochs = None
        if epochs is not None and dataset_size >= 1 and 0 < expected_batch_size < math.inf:
            steps = steps_for_epochs(epochs, dataset_size, expected_batch_size)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            problems.append(f"unknown options {', '.join(unknown)}.\nHINT: known are {', '.join(sorted(known))}.")
        fields = {name: value for name, value in options.items() if name in known}
        fields |= {
            "dataset_size": dataset_size,
            "expected_batch_size": expected_batch_size,
            "steps": 1 if steps is None else steps,
            "delta": (1 / dataset_size if dataset_size > 1 else 0.5) if delta is None else delta,
            "noise_multiplier": 1.0 if noise_multiplier is None else noise_multiplier,
        }
        with warnings.catch_warnings():  # one of this plan's values may be a placeholder
            warnings.simplefilter("ignore")
            try:
                draft = cls(**fields)
            except ValueError as error:
                raise ValueError("\n".join([str(error), *problems])) from None
        if problems:
            raise ValueError("\n".join(problems))
        if epsilon is not None:
            fields["noise_multiplier"] = draft._calibrated(epsilon)
        return cls(**fields)

    @property
    def sample_rate(self) -> float:
        """q, the probability with which each example is in a step's sample."""
        return self.expected_batch_size / self.dataset_size

    @property
    def tracks_radius(self) -> bool:
        """Whether a clipping radius is estimated from the private data at every step."""
        return self.radius_quantile is not None

    @property
    def certified(self) -> bool:
        """Whether a guarantee exists: false for `batch_max`, without any bound, and for a run without noise."""
        return self.scaling not in ("batch_max", "none") and self.noise_multiplier > 0

    @property
    def clips_examples(self) -> bool:
        """Whether the guarantee rests on clipping each example's gradient, and not on bounds of the network."""
        return self.scaling.startswith("clip_")

    @property
    def first_switched_step(self) -> float:
        """From which step on `switch_to` is in force; infinity without a switch."""
        return math.inf if self.switch_at is None else math.ceil(self.switch_at * self.steps)

    def scaling_at(self, step: int) -> str:
        """The scaling of a step."""
        switched = step >= self.first_switched_step and not self.clips_examples
        return str(self.switch_to) if switched else self.scaling

    def clipping_at(self, step: int) -> str | None:
        """The clipping function of a step; None where nothing is clipped per example."""
        switched = step >= self.first_switched_step and self.clips_examples
        return self.switch_to if switched else self.clipping

    @property
    def step_noise_multiplier(self) -> float:
        """The noise multiplier of everything one step releases: the sum, and the quantile if there is one."""
        if self.radius_noise_multiplier is None:
            return self.noise_multiplier
        return join_noise_multipliers((self.noise_multiplier, self.radius_noise_multiplier))

    def step_event(self) -> LedgerEntry:
        """What one step adds to the ledger."""
        mechanism = GAUSSIAN if self.sample_rate == 1 else SUBSAMPLED_GAUSSIAN
        label = "gradient and radius" if self.tracks_radius else "gradient"
        return LedgerEntry(mechanism, self.step_noise_multiplier, self.sample_rate, 1, label)

    def preliminary_events(self) -> tuple[LedgerEntry, ...]:
        """What is released before the first step: a Gaussian mechanism for each statistic."""
        return tuple(LedgerEntry(GAUSSIAN, level, 1.0, 1, label) for label, level in self.preliminary)

    def events(self, steps: int | None = None) -> tuple[LedgerEntry, ...]:
        """The ledger of the planned run, or of a run of so many steps."""
        count = self.steps if steps is None else steps
        taken = (dataclasses.replace(self.step_event(), count=count),) if count else ()
        return (*self.preliminary_events(), *taken)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` of it, also after JSON, is an equal plan."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """Inverse of `to_dict`. Unknown keys are refused: a constant of the guarantee would be dropped."""
        known = {field.name for field in dataclasses.fields(cls)}
        missing = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING} - set(values)
        if wrong := sorted(set(values) - known):
            raise ValueError(f"unknown plan keys {', '.join(wrong)}.\nHINT: known are {', '.join(sorted(known))}.")
        if missing:
            raise ValueError(f"plan keys {', '.join(sorted(missing))} are missing.\nHINT: they have no default.")
        return cls(**values)

    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON (sorted keys, floats in shortest exact form)."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).digest()

    def _calibrated(self, epsilon: float) -> float:
        """The gradient's noise multiplier for which the whole run, radius queries and statistics included, meets
        epsilon."""
        from lipdp_lightning.accounting.calibrate import noise_multiplier_for

        joined = noise_multiplier_for(
            epsilon,
            self.delta,
            self.sample_rate,
            self.steps,
            self.accountant,
            self.adjacency,
            self.max_examples_per_unit,
            preliminary=self.preliminary_events(),
        )
        if self.radius_noise_multiplier is None:
            return joined
        if self.radius_noise_multiplier <= joined:
            raise ValueError(
                f"radius_noise_multiplier {self.radius_noise_multiplier} alone spends more than epsilon {epsilon}: "
                f"the step as a whole needs {joined:.4g}, and nothing is left for the gradient.\n"
                f"HINT: radius_noise_multiplier of about {5 * joined:.3g} costs the gradient 2 %."
            )
        gradient = 1 / math.sqrt((1 / joined) ** 2 - (1 / self.radius_noise_multiplier) ** 2)
        return gradient * (1 + 1e-12)  # joining again must not fall below by rounding


def _normalised(plan: PrivacyPlan) -> dict[str, Any]:
    """Values as YAML and JSON may bring them (lists, mappings, whole numbers), in the one form that is hashed."""
    result: dict[str, Any] = {}
    for name in _FLOATS:
        value = getattr(plan, name)
        result[name] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    batch = plan.expected_batch_size
    if isinstance(batch, float) and batch.is_integer():
        result["expected_batch_size"] = int(batch)
    for name in _PAIRS:
        result[name] = _pairs(getattr(plan, name))
    norm = plan.max_norm
    result["max_norm"] = _pairs(norm) if isinstance(norm, Mapping | list | tuple) else norm
    if isinstance(norm, int) and not isinstance(norm, bool):
        result["max_norm"] = float(norm)
    free = plan.free_layers
    result["free_layers"] = tuple(free) if isinstance(free, list | tuple) else free
    return result


def _pairs(value: Any) -> Any:
    """(pattern, number) pairs as a tuple; what does not look like them is left for the checks to name."""
    items = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((str(pattern), float(number)) for pattern, number in items)
    except (TypeError, ValueError):
        return value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
