"""Holds the facts of one run, checks them against each other, and makes the JSON report of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from lipdp_lightning.report.formats import plain_value

__all__ = ["METRIC_SOURCES", "RunFacts", "json_ready", "report_dict", "report_json"]

ADJACENCIES = ("add_remove", "replace_one")
METRIC_SOURCES = ("public", "validation", "private")
NONPRIVATE_PREFIX = "nonprivate/"
# The number of undefined values that a report lists one by one; a diverged run has one per step.
LISTED_NONFINITE = 50


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Plain data about one training run, from which every statement of the reports is derived.

    ``epsilon`` is the guarantee: the upper end of the accountant's bracket for the PLANNED steps. The epsilon of the
    steps taken is a separate number, because a run may have been stopped in view of what it released. Facts that
    contradict the guarantee are refused, all of them at once.

    Each group is a dict with ``name, parameters, delta, noise_std, lipschitz, input_bound, cotangent_bound,
    weight_norm, max_norm, on_boundary`` and optionally ``signal``, the root mean square per coordinate of the released
    sum; ``delta`` and ``noise_std`` belong to the same step. ``averaged_groups`` are bounds of averaged weights, if
    those are evaluated and released. ``metric_sources`` says for each metric which data it was computed on: "public",
    "validation" (held-out records, outside the guarantee) or "private". A metric without a source counts as private.
    ``history`` rows hold ``step``, ``epsilon`` and whatever was measured there; a key that starts with ``nonprivate/``
    is reported as such. ``calibration`` holds the scores and diagrams of evaluations on held-out records
    (`callbacks.CalibrationMetrics`). ``data`` holds what the data module declares, a line for each fact.

    Raises:
        ValueError: lists every contradiction between the facts.
    """

    certified: bool
    epsilon: float | None
    delta: float | None
    adjacency: str
    noise_multiplier: float | None
    sample_rate: float | None
    dataset_size: int
    expected_batch_size: float
    steps_planned: int
    steps_taken: int
    accountant: str
    scaling: str
    allocation: str
    secret_fixed: bool
    epsilon_taken: float | None = None
    epsilon_lower: float | None = None
    epsilon_upper: float | None = None
    epsilon_claimed_by_paper: float | None = None
    not_certified_because: str | None = None
    projection: str | None = None
    loss_clip: float | None = None
    cotangent_clip: Any = None
    clipping: str | None = None
    clip_norm: float | None = None
    switch: str | None = None
    unit: str = "example"
    groups: list[dict[str, Any]] = field(default_factory=list)
    averaged_groups: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    metric_sources: dict[str, str] = field(default_factory=dict)
    primary_metric: str | None = None
    nonprivate_released: list[str] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    calibration: list[dict[str, Any]] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    title: str = "Private training run"
    created: str = ""
    config: str = ""

    def __post_init__(self) -> None:
        problems = _contradictions(self)
        if problems:
            raise ValueError("these facts cannot be reported:\n" + "\n".join(f"- {text}" for text in problems))

    @classmethod
    def from_dict(cls, report: Mapping[str, Any]) -> RunFacts:
        """Returns the facts behind a JSON report; derived and unknown keys are left out."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in report.items() if key in known})

    @property
    def stopped_early(self) -> bool:
        return self.steps_taken < self.steps_planned

    def released_without_privacy(self) -> list[str]:
        """Returns ``nonprivate_released``, completed by what the other facts show to be released without privacy."""
        items = list(self.nonprivate_released)
        mentioned = {item.partition(":")[0].strip() for item in items}

        def add(name: str, why: str) -> None:
            if name not in mentioned:
                items.append(f"{name}: {why}")
                mentioned.add(name)

        if not self.certified:
            add("the model itself", "the run is not certified, so no release of it is covered by a guarantee")
        for name in self.metrics:
            if self.metric_source(name) == "private":
                stated = name in self.metric_sources
                add(
                    name,
                    "computed on private data" if stated else "its data is not stated, so it counts as private",
                )
        for row in self.history:
            for key in row:
                if str(key).startswith(NONPRIVATE_PREFIX):
                    add(str(key), "logged during training from private data")
        return items

    def metric_source(self, name: str) -> str:
        """Returns the kind of data that a metric was computed on."""
        if name.startswith(NONPRIVATE_PREFIX):
            return "private"
        return self.metric_sources.get(name, "private")

    def public(self) -> RunFacts:
        """Returns the facts that a page may show: without a certificate, there is no epsilon among them."""
        if self.certified:
            return self
        changes: dict[str, Any] = {name: None for name in _EPSILONS}
        for name in ("groups", "metrics", "metric_sources", "history", "ledger"):
            changes[name] = _without_epsilon(getattr(self, name), rename=False)
        return dataclasses.replace(self, **changes)


_EPSILONS = ("epsilon", "epsilon_taken", "epsilon_lower", "epsilon_upper", "epsilon_claimed_by_paper")


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _contradictions(facts: RunFacts) -> list[str]:
    """Returns everything in the facts that makes the guarantee they state untrue or meaningless."""
    problems = []
    if facts.adjacency not in ADJACENCIES:
        problems.append(f"adjacency {facts.adjacency!r} is unknown.\n  HINT: use one of {', '.join(ADJACENCIES)}")
    for name, source in facts.metric_sources.items():
        if source not in METRIC_SOURCES:
            problems.append(
                f"metric {name!r} says it was computed on {source!r}.\n  HINT: use one of {', '.join(METRIC_SOURCES)}"
            )
    if facts.steps_taken > facts.steps_planned:
        problems.append(
            f"{facts.steps_taken} steps were taken but {facts.steps_planned} were planned, and epsilon is "
            "that of the planned ones.\n  HINT: account for the steps taken, or stop at the planned ones"
        )
    return problems + (_broken_guarantee(facts) if facts.certified else [])


def _broken_guarantee(facts: RunFacts) -> list[str]:
    problems = []
    if facts.scaling == "batch_max":
        problems.append(
            "certified is true with the scaling batch_max, whose factor depends on the whole batch.\n"
            "  HINT: set certified=False, or use the scaling layerwise"
        )
    if not _finite(facts.epsilon) or facts.epsilon < 0:
        problems.append(f"certified is true with epsilon {facts.epsilon}.\n  HINT: give the accountant's upper end")
    elif _finite(facts.epsilon_upper) and facts.epsilon < facts.epsilon_upper * (1 - 1e-9):
        problems.append(
            f"epsilon {facts.epsilon} is below {facts.epsilon_upper}, the accountant's upper end.\n"
            "  HINT: the guarantee is the upper end"
        )
    if not _finite(facts.delta) or not 0 <= facts.delta < 1:
        problems.append(f"certified is true with delta {facts.delta}.\n  HINT: delta lies in [0, 1)")
    if not _finite(facts.noise_multiplier) or facts.noise_multiplier <= 0:
        problems.append(
            f"certified is true with noise multiplier {facts.noise_multiplier}.\n"
            "  HINT: without noise there is no guarantee: certified=False"
        )
    declared = facts.expected_batch_size / facts.dataset_size if facts.dataset_size > 0 else math.nan
    if not _finite(facts.sample_rate) or not math.isclose(facts.sample_rate, declared, rel_tol=1e-6):
        problems.append(
            f"sample rate {facts.sample_rate} is not expected batch size / data set size = {declared}.\n"
            "  HINT: all three come from one plan"
        )
    return problems


def _is_epsilon(key: Any) -> bool:
    leaf = str(key).replace(".", "/").rsplit("/", 1)[-1].lower()
    return leaf == "eps" or leaf.startswith("epsilon")


def _without_epsilon(value: Any, *, rename: bool) -> Any:
    """Drops every entry named epsilon; with ``rename``, plain ones are kept under the name of a mere claim."""
    if isinstance(value, Mapping):
        kept = {key: _without_epsilon(item, rename=rename) for key, item in value.items() if not _is_epsilon(key)}
        for name in ("epsilon_claimed_by_paper", "epsilon"):
            if rename and name in value:
                kept["epsilon_claimed_by_paper"] = value[name]
        return kept
    if isinstance(value, (list, tuple)):
        return [_without_epsilon(item, rename=rename) for item in value]
    return value


def json_ready(value: Any, nonfinite: list[str], path: str = "") -> Any:
    """Returns plain JSON data. JSON has no infinity: such a number becomes null and is listed in ``nonfinite``."""
    value = plain_value(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(f"{path}: {float(value)}")
        return None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item, nonfinite, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return json_ready(value.tolist(), nonfinite, path)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [json_ready(item, nonfinite, f"{path}[{index}]") for index, item in enumerate(items)]
    return str(value)


def report_dict(facts: RunFacts) -> dict[str, Any]:
    """Returns the content of ``privacy_report.json``.

    Without a certificate ``epsilon`` is null, and what the original paper would have claimed stands under
    ``epsilon_claimed_by_paper`` only.
    """
    report = {item.name: getattr(facts, item.name) for item in dataclasses.fields(facts)}
    if not facts.certified:
        claim = facts.epsilon_claimed_by_paper
        report.update(dict.fromkeys(_EPSILONS))
        report["epsilon_claimed_by_paper"] = facts.epsilon if claim is None else claim
        for name in ("groups", "metrics", "metric_sources", "history", "ledger"):
            report[name] = _without_epsilon(report[name], rename=True)
    report["nonprivate_released"] = facts.released_without_privacy()
    nonfinite: list[str] = []
    ready: dict[str, Any] = json_ready(report, nonfinite)
    if len(nonfinite) > LISTED_NONFINITE:
        nonfinite = [*nonfinite[:LISTED_NONFINITE], f"and {len(nonfinite) - LISTED_NONFINITE} more"]
    ready["nonfinite_values"] = nonfinite
    return ready


def report_json(facts: RunFacts) -> str:
    """Returns ``privacy_report.json`` as strict JSON, without NaN and Infinity; invisible characters are escaped."""
    text = json.dumps(report_dict(facts), indent=2, allow_nan=False, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text) + "\n"
