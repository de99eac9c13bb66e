"""Implements `lipdp audit`: all questions about one configuration, with one probability of a false alarm."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..budget.calibrate import privacy_bound
from ..mechanism.noise import Place
from ..mechanism.step import Mechanism
from ..privacy.keys import derive_key
from ..privacy.plan import PrivacyPlan
from ..training.module import PrivateModule
from .attack import attack
from .blackbox import black_box_questions, our_implementation
from .canaries import gradient_canary, run_finding, run_scores, step_finding, step_scores
from .composition import composition_finding, deep_subject, depth_finding
from .confidence import shares
from .findings import Finding, strict, verdict
from .neighbouring_runs import neighbouring_finding
from .neighbours import Worst, interaction_finding, neighbours_finding, search_neighbours
from .noise_checks import noise_finding, noise_sample
from .one_run import canary_run, one_run_finding
from .optimistic_epsilon import accounting_finding, claimed_epsilon
from .sampling_checks import plan_sampler, sampling_finding
from .subject import SECRET, Subject
from .synthetic import made_up_data, plain_copy

CONFIDENCE = 0.999
BLACK_BOX_SCALINGS = ("worst_case", "layerwise", "joint", "radius", "exact", "exact_layerwise", "batch_max")


@dataclass(frozen=True)
class Effort:
    """Sets how much is tried: starts and steps of searches, trials of canaries, whole runs and their length."""

    name: str
    restarts: int
    attack_steps: int
    climbs: int
    trials: int
    input_trials: int
    runs: int = 0
    run_steps: int = 40
    black_box: bool = False


EFFORTS = {
    "quick": Effort("quick", restarts=16, attack_steps=20, climbs=60, trials=6000, input_trials=4000),
    "full": Effort(
        "full", restarts=32, attack_steps=60, climbs=300, trials=20_000, input_trials=8000, runs=1500, black_box=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class AuditReport:
    """Every finding of an audit; with probability ``confidence``, no statistical finding about a correct program is a
    violation.
    """

    title: str
    suite: str
    confidence: float
    plan: PrivacyPlan
    claimed_epsilon: float
    findings: tuple[Finding, ...]
    seconds: float
    seed: int

    @property
    def violations(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.violated)

    def as_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = strict(
            {
                "title": self.title,
                "suite": self.suite,
                "verdict": verdict(bool(self.violations)),
                "violations": [f.name for f in self.violations],
                "confidence": self.confidence,
                "epsilon_claimed": self.claimed_epsilon,
                "delta": self.plan.delta,
                "certified": self.plan.certified,
                "seed": self.seed,
                "seconds": round(self.seconds, 1),
                "plan": self.plan.to_dict(),
                "findings": [f.as_dict() for f in self.findings],
            }
        )
        return content


Question = Callable[[float], Finding]


def run_audit(
    module: PrivateModule,
    plan: PrivacyPlan,
    data: Any,
    *,
    effort: Effort | str = "quick",
    confidence: float = CONFIDENCE,
    seed: int = 0,
    title: str = "audit",
    kind: type[Mechanism] = Mechanism,
    extra: Mapping[str, Question] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> AuditReport:
    """Asks all questions about the step and the run of a module under a plan.

    Examples are made up in the shape that ``data`` declares; no private row is read.

    Args:
        module: the module to audit; it is copied.
        plan: the plan whose claims are tested.
        data: a data module, whose declarations alone are used.
        effort: how much is tried: one of ``EFFORTS`` or its name.
        confidence: the probability that no statistical finding about a correct program is a violation.
        seed: seed of everything that is random in the audit.
        title: the title of the report.
        kind: the class of the mechanism; tests pass broken ones.
        extra: further statistical questions, each called with its share of alpha.
        progress: called with the name of each question before it is asked.

    Returns:
        The report with one finding for each question.

    Raises:
        ValueError: if the confidence is not in (0, 1), or if the plan claims no privacy.
    """
    chosen = EFFORTS[effort] if isinstance(effort, str) else effort
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not in (0, 1). HINT: {CONFIDENCE}")
    if plan.noise_multiplier == 0 or plan.scaling == "none":
        raise ValueError(
            f"scaling {plan.scaling!r} with noise multiplier {plan.noise_multiplier:g} claims no privacy, so there is "
            "nothing to audit. HINT: use a configuration with noise and a bounded or clipped gradient."
        )
    start = time.monotonic()
    questions = Questions(plain_copy(module), plan, data, chosen, seed, kind)
    statistical = questions.statistical() | dict(extra or {})
    share = shares(1 - confidence, len(statistical))
    findings = []
    for name, question in (questions.exact() | statistical).items():
        progress(name)
        findings.append(question(share))
    questions.close()
    length = time.monotonic() - start
    return AuditReport(title, chosen.name, confidence, plan, questions.claimed, tuple(findings), length, seed)


class Questions:
    """The questions of a suite by name, each to be called with its share of alpha; exact questions use none of it."""

    def __init__(
        self, module: PrivateModule, plan: PrivacyPlan, data: Any, effort: Effort, seed: int, kind: type[Mechanism]
    ) -> None:
        self.module, self.plan, self.data, self.effort, self.seed, self.kind = module, plan, data, effort, seed, kind
        self.secret = derive_key(SECRET, "audit", seed)[:16]
        self.claimed = claimed_epsilon(plan)
        self.subject = self._subject()
        self._sample: Tensor | None = None
        self._worst: Worst | None = None

    def close(self) -> None:
        self.subject.close()

    def _subject(self, place: Place | None = None, switched: bool = False) -> Subject:
        options: dict[str, Any] = {"kind": self.kind, "secret": self.secret, "place": place, "switched": switched}
        return Subject(plain_copy(self.module), self.plan, self.data.input_shape, **options)

    @property
    def sample(self) -> Tensor:
        """Steps without examples, drawn once for all questions about the noise."""
        if self._sample is None:
            self._sample = noise_sample(self.subject)
        return self._sample

    @property
    def worst(self) -> Worst:
        if self._worst is None:
            self._worst = self._search(self.subject)
        return self._worst

    def _search(self, subject: Subject) -> Worst:
        effort = self.effort
        return search_neighbours(
            subject, restarts=effort.restarts, steps=effort.attack_steps, climbs=effort.climbs, seed=self.seed
        )

    # ---- exact

    def exact(self) -> dict[str, Question]:
        plan, chosen = self.plan, {}
        if not plan.clips_examples:
            chosen["certificate"] = lambda share: self._certificate()
        chosen["neighbours"] = lambda share: neighbours_finding(self.subject, self.worst)
        chosen["scaling"] = lambda share: interaction_finding(self.subject, seed=self.seed)
        if plan.first_switched_step < math.inf:
            chosen["after the switch"] = lambda share: self._switched()
        chosen["accounting"] = lambda share: accounting_finding(plan, self.claimed)
        if self.effort.runs:
            chosen["neighbouring runs"] = lambda share: self._neighbouring_runs()
        return chosen

    def _certificate(self) -> Finding:
        module, effort = plain_copy(self.module), self.effort
        report = attack(
            module.network, tuple(self.data.input_shape), module.input_bound, self.subject.plain_loss,
            restarts=effort.restarts, steps=effort.attack_steps, seed=self.seed, weights=True,
        )  # fmt: skip
        false, worst = report.violations(), report.worst
        text = f"Of {len(list(report.claims()))} claims, attacked in inputs, labels and weights, the tightest is "
        text += f"{worst.claim}: {worst.ratio:.4f} of its bound."
        if false:
            text = f"False: {'; '.join(f'{f.claim} ({f.ratio:.4g})' for f in false[:5])}. {text}"
        return Finding(
            "certificate", "Is every bound of the certificate an upper bound?", verdict(bool(false)), text,
            factor=worst.ratio, values={"claims": len(list(report.claims())), "worst": worst.claim},
        )  # fmt: skip

    def _switched(self) -> Finding:
        subject = self._subject(switched=True)
        found = neighbours_finding(subject, self._search(subject))
        subject.close()
        return dataclasses.replace(found, name="after the switch")

    def _neighbouring_runs(self) -> Finding:
        module, example = plain_copy(self.module), self.worst.pair[1]
        return neighbouring_finding(module, self.plan, self.data, self.subject, example, self.seed)

    # ---- statistical

    def statistical(self) -> dict[str, Question]:
        plan, effort, subject = self.plan, self.effort, self.subject
        sampler = plan_sampler(plan, self.secret)
        chosen: dict[str, Question] = {
            "noise": lambda share: noise_finding(subject, self.sample, share, self._subject),
            "composition": lambda share: composition_finding(subject, self.sample, share),
            "sampling": lambda share: sampling_finding(sampler, plan.dataset_size, plan.sample_rate, share),
            "gradient canary": self._gradient_canary,
            "input canary": self._input_canary,
            "one run": self._one_run,
        }
        if not plan.clips_examples:
            chosen["depth"] = lambda share: depth_finding(lambda d: deep_subject(d, plan, self.kind), share)
        if effort.runs:
            chosen["whole runs"] = self._whole_runs
        if effort.black_box and plan.scaling in BLACK_BOX_SCALINGS and not plan.clips_examples:
            chosen |= self._black_box()
        return chosen

    def _gradient_canary(self, share: float) -> Finding:
        canary = gradient_canary(self.subject, self.seed)
        scores = step_scores(self.subject, self.effort.trials, canary=canary)
        return step_finding("gradient canary", self.plan, scores, share, self.claimed)

    def _input_canary(self, share: float) -> Finding:
        scores = step_scores(self.subject, self.effort.input_trials, pair=self.worst.pair)
        return step_finding("input canary", self.plan, scores, share, self.claimed)

    def _one_run(self, share: float) -> Finding:
        data = made_up_data(self.subject, self.data, self.seed)
        run = canary_run(plain_copy(self.module), self.plan, data, seed=self.seed)
        return one_run_finding(self.plan, run, share)

    def _whole_runs(self, share: float) -> Finding:
        steps = min(self.plan.steps, self.effort.run_steps)
        canary = gradient_canary(self.subject, self.seed)
        sampler = plan_sampler(self.plan, self.secret)
        scores = run_scores(self.subject, sampler, self.effort.runs, canary=canary, steps=steps)
        claimed = privacy_bound(
            self.plan.step_noise_multiplier, self.plan.delta, self.plan.sample_rate, steps, "pld"
        ).epsilon  # fmt: skip
        return run_finding("whole runs", self.plan, scores, share, claimed, steps)

    def _black_box(self) -> dict[str, Question]:
        implementation = our_implementation(self.plan.scaling, kind=self.kind)
        return black_box_questions(implementation)
