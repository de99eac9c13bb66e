"""Broken implementations of this engine and of DP-SGD, each with the audit that catches it.

An entry holds a function that asks one audit about the sound program and about the broken one. ``GALLERY`` is the
table of docs/audit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from broken_training import dp_sgd
from private_step import drawn_otherwise
from test_mutations import (
    DividesByTheDrawn,
    MeanOverTheBatch,
    NoiseAfterTheReduction,
    NoiseInFloat32,
    NoiseOfOneRank,
    SkipsEmptySamples,
    SumsWithoutSquares,
)  # fmt: skip
from torch import Tensor, nn

from lipdp_lightning.audit.blackbox import (
    HyperParameters,
    Implementation,
    additivity_finding,
    black_box_depth_finding,
    bound_finding,
    calibration_finding,
    our_implementation,
    per_example_finding,
)
from lipdp_lightning.audit.canaries import gradient_canary, step_finding, step_scores
from lipdp_lightning.audit.composition import composition_finding, deep_subject, depth_finding
from lipdp_lightning.audit.findings import Finding
from lipdp_lightning.audit.neighbours import interaction_finding, neighbours_finding, search_neighbours
from lipdp_lightning.audit.noise_checks import noise_finding, noise_sample
from lipdp_lightning.audit.optimistic_epsilon import accounting_finding, claimed_epsilon
from lipdp_lightning.audit.sampling_checks import Sampler, plan_sampler, sampling_finding
from lipdp_lightning.audit.subject import Subject
from lipdp_lightning.layers import KeyedDropout, MaxMin, ScaledLinear, scale_cotangent
from lipdp_lightning.mechanism import radii
from lipdp_lightning.mechanism import step as mechanism_module
from lipdp_lightning.mechanism.noise import Place, StepNoise, Sum
from lipdp_lightning.mechanism.reductions import Reduce
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule

ALPHA = 1e-4
HIDDEN = 64
Ask = Callable[[], Finding]
Draw = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Broken:
    """``sound`` and ``broken`` ask the same audit; ``caught_by`` is the audit's name in the table."""

    caught_by: str
    sound: Ask
    broken: Ask


def plan_of(**options: Any) -> PrivacyPlan:
    import warnings

    chosen: dict[str, Any] = {
        "dataset_size": 1000, "expected_batch_size": 20, "steps": 50, "noise_multiplier": 0.8, "delta": 1e-5,
        "accountant": "pld", "scaling": "worst_case", "allocation": "equal", "max_norm": None,
    } | options  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PrivacyPlan.from_dict(chosen)


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, HIDDEN), MaxMin(), nn.Linear(HIDDEN, 5))
    return net


def saturated() -> nn.Module:
    """Large weights: gradients come near their bounds."""
    net = mlp()
    with torch.no_grad():
        net[2].weight.mul_(30)
    return net


def subject_of(
    kind: type[Mechanism] = Mechanism, build: Callable[[], nn.Module] = mlp, place: Place | None = None, **options: Any
) -> Subject:
    return Subject(PrivateModule(build()), plan_of(**options), (12,), kind=kind, place=place)


# ---- what is asked


def noise_of(kind: type[Mechanism]) -> Finding:
    subject = subject_of(kind)
    return noise_finding(subject, noise_sample(subject, 24), ALPHA, lambda place: subject_of(kind, place=place), (2,))


def composition_of(kind: type[Mechanism]) -> Finding:
    subject = subject_of(kind)
    return composition_finding(subject, noise_sample(subject, 40), ALPHA)


def depth_of(kind: type[Mechanism]) -> Finding:
    return depth_finding(lambda depth: deep_subject(depth, plan_of(), kind), ALPHA, (1, 4))


def canary_of(kind: type[Mechanism]) -> Finding:
    subject = subject_of(kind)
    scores = step_scores(subject, 200, canary=gradient_canary(subject))
    return step_finding("gradient canary", subject.plan, scores, ALPHA, math.nan)


def neighbours_of(prepare: Callable[[Subject], None] = lambda subject: None, **options: Any) -> Finding:
    subject = subject_of(build=saturated, **options)
    prepare(subject)
    return neighbours_finding(subject, search_neighbours(subject, restarts=6, steps=6, climbs=4))


def scaling_of(prepare: Callable[[Subject], None] = lambda subject: None, **options: Any) -> Finding:
    subject = subject_of(**options)
    prepare(subject)
    return interaction_finding(subject)


def sampling_of(sampler: Sampler) -> Finding:
    return sampling_finding(sampler, 1000, 0.05, ALPHA, steps=120)


# ---- broken engines


def wrapped(change: Callable[[int, Place, bytes], tuple[int, Place, bytes]]) -> type[Mechanism]:
    """The request for a step's noise, changed: (step, place, digest)."""

    class Changed(Mechanism):
        def _noise_of(self, step: int) -> StepNoise:
            return StepNoise.of(self._secret, *change(step, self.place, self.digest), self.plan.secure)

    return Changed


def shaped(change: Callable[[Draw, int, int, int], Tensor]) -> type[Mechanism]:
    """The drawn normals, changed before their use."""

    class Shaped(Mechanism):
        def _release(self, sums: Sequence[Sum], noise: StepNoise, reduce: Reduce | None) -> None:
            with drawn_otherwise(change):
                super()._release(sums, noise, reduce)

    return Shaped


def added(factor: Callable[[Mechanism, int], float]) -> type[Mechanism]:
    """Noise of other deviations than are stated; the sums of each are numbered."""

    class Added(Mechanism):
        def _sums(self, numbers: StepNumbers) -> list[Sum]:
            sums = super()._sums(numbers)
            return [replace(one, deviation=one.deviation * factor(self, n)) for n, one in enumerate(sums)]

    return Added


def parameters_of(mechanism: Mechanism) -> list[nn.Parameter]:
    return list(mechanism._parameters)


def of_the_last_layer(mechanism: Mechanism, number: int) -> float:
    groups = list(mechanism._parameters.values())
    return 0.0 if number >= len(groups) or groups[number] == groups[-1] else 1.0


class Skips(SkipsEmptySamples):
    def privatize_(self, step: int, reduce: Any = None) -> None:
        super().privatize_(step, reduce)
        self._step = None


class OneDraw(Mechanism):
    """The key is that of the first step."""

    def _noise_of(self, step: int) -> StepNoise:
        return super()._noise_of(0)


def same_for_all_groups(draw: Draw, number: int, start: int, count: int) -> Tensor:
    return draw(0, start, count)


def uniform_noise(draw: Draw, number: int, start: int, count: int) -> Tensor:
    return math.sqrt(12) * (torch.special.ndtr(draw(number, start, count)) - 0.5)


def stating(deviations: Callable[[Mechanism, StepNumbers], dict[str, float]]) -> type[Mechanism]:
    """Other deviations, both stated and drawn."""

    class Stating(Mechanism):
        def numbers(self) -> StepNumbers:
            numbers = super().numbers()
            return replace(numbers, deviations=deviations(self, numbers))

    return Stating


WithoutTheRoot = stating(lambda m, n: {k: m.plan.noise_multiplier * v for k, v in n.sensitivities.items()})
"""sigma Delta_k on each of K groups, accounted as one mechanism of multiplier sigma."""

HalfTheSensitivity = stating(lambda m, n: {k: v / 2 for k, v in n.deviations.items()})
"""Noise for replace-one halves, or a factor of two forgotten."""

IgnoresTheBound = stating(lambda m, n: dict.fromkeys(n.deviations, m.plan.noise_multiplier))
"""Noise of the multiplier alone."""


class UnboundedInput(PrivateModule):
    """Trains on inputs as they come, certified as if they were in the ball."""

    def _of_bounded(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return network(x)


def mean_loss(subject: Subject) -> None:
    subject.module.loss = MeanOverTheBatch()


def keyed_by_row(subject: Subject) -> None:
    key = subject.module._key_dropout
    subject.module._key_dropout = lambda ids: key(torch.arange(len(ids)))  # type: ignore[method-assign]


def with_dropout() -> nn.Module:
    net = mlp()
    return nn.Sequential(net[0], KeyedDropout(0.5), net[1], net[2])


PLAIN_FORWARD = ScaledLinear.forward


def passes_its_factor_on(self: ScaledLinear, x: Tensor) -> Tensor:
    """The head's factor also multiplies the cotangent that the first layer receives."""
    if self.in_features == HIDDEN:
        x = scale_cotangent(x, 4 / self.example_norms(x).detach().clamp_min(1e-6))
    return PLAIN_FORWARD(self, x)


@contextmanager
def patched(*targets: tuple[Any, str, Any]) -> Any:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for owner, name, value in targets:
            stack.enter_context(patch.object(owner, name, value))
        yield


def under(context: Callable[[], Any], ask: Ask) -> Ask:
    def asked() -> Finding:
        with context():
            return ask()

    return asked


def norm_without_bias(self: ScaledLinear, x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


# ---- broken samplers


def fixed_size(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(step))
    return order[: round(rows * rate)].sort().values[rank::world]


def shuffled_epochs(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    size = max(1, round(rows * rate))
    epoch, place = divmod(step, rows // size)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
    return order[place * size : (place + 1) * size].sort().values[rank::world]


SOUND_SAMPLER = plan_sampler(plan_of(expected_batch_size=50))


def never_empty(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    attempts = (SOUND_SAMPLER(rows, rate, step + 10_000 * k, rank, world) for k in range(100))
    return next(a for a in attempts if len(a))


def each_rank_for_itself(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    return SOUND_SAMPLER(rows, rate / world, step + 10_000 * rank, 0, 1)


def rate_of_the_rows(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    return SOUND_SAMPLER(rows, rate * 1000 / rows, step, rank, world)


def twice_the_rate(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    return SOUND_SAMPLER(rows, 2 * rate, step, rank, world)


def same_sample_twice(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    return SOUND_SAMPLER(rows, rate, step // 2, rank, world)


def early_rows_more_often(rows: int, rate: float, step: int, rank: int, world: int) -> Tensor:
    drawn = SOUND_SAMPLER(rows, 2 * rate, step, 0, 1)
    keep = torch.rand(rows, generator=torch.Generator().manual_seed(step)) > torch.arange(rows) / rows
    return drawn[keep[drawn]][rank::world]


# ---- broken DP-SGD

SGD = HyperParameters(1.0, learning_rate=0.1)


def bound_of(implementation: Implementation) -> Finding:
    return bound_finding(implementation, SGD)


def per_example_of(implementation: Implementation) -> Finding:
    return per_example_finding(implementation, SGD, (1, 2, 4, 8, 16, 32, 64))


def calibration_of(implementation: Implementation) -> Finding:
    return calibration_finding(implementation, SGD, ALPHA, models=3, steps=2, values=5)


def additivity_of(implementation: Implementation) -> Finding:
    return additivity_finding(implementation, SGD.but(bound=0.5))


def deep_network(depth: int) -> nn.Module:
    layers = [nn.Linear(8, 8, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    return nn.Sequential(*layers)


def black_box_depth_of(fault: str) -> Finding:
    x = torch.full((1, 8), 8**-0.5)

    def build(depth: int) -> tuple[Implementation, tuple[Tensor, Tensor]]:
        return dp_sgd(fault, lambda: deep_network(depth)), (x, 100 * x)

    return black_box_depth_finding(build, SGD.but(bound=0.5, noise_multiplier=1.0), ALPHA, (1, 4))


def stated(plan: PrivacyPlan, factor: float = 1.0, of: PrivacyPlan | None = None) -> Finding:
    return accounting_finding(plan, factor * claimed_epsilon(of or plan))


def entries(caught_by: str, ask: Callable[[Any], Finding], sound: Any, broken: dict[str, Any]) -> dict[str, Broken]:
    return {name: Broken(caught_by, lambda: ask(sound), lambda what=what: ask(what)) for name, what in broken.items()}


def no_state(*state: Any) -> bytes:
    return bytes(32)


def layerwise() -> Finding:
    return neighbours_of(scaling="layerwise")


MEANS = (("mean", 2.0),)

GALLERY: dict[str, Broken] = {
    **entries("noise", noise_of, Mechanism, {
        "division by the drawn sample": DividesByTheDrawn,
        "an empty sample is skipped": Skips,
        "noise in float32": NoiseInFloat32,
        "noise on one rank only": NoiseOfOneRank,
        "full noise on every rank": NoiseAfterTheReduction,
        "the same noise at every step": OneDraw,
        "the same noise on all ranks": wrapped(lambda step, place, digest: (step, replace(place, rank=0), digest)),
        "one draw for all groups": shaped(same_for_all_groups),
        "uniform noise of the same variance": shaped(uniform_noise),
        "no noise on the last layer": added(of_the_last_layer),
        "the variance is added for the deviation": added(lambda m, n: m.plan.noise_multiplier),
    }),
    "noise key without the state": Broken(
        "noise", lambda: noise_of(Mechanism),
        under(lambda: patched((mechanism_module, "digest_of", no_state)), lambda: noise_of(Mechanism)),
    ),
    **entries("gradient canary", canary_of, Mechanism, {
        "a third of the noise that is stated": added(lambda m, n: 1 / 3),
    }),
    **entries("composition", composition_of, Mechanism, {"half the sensitivity": HalfTheSensitivity}),
    **entries("depth", depth_of, Mechanism, {"no root of the number of layers": WithoutTheRoot}),
    "scaling by the batch maximum": Broken(
        "neighbours", layerwise,
        lambda: neighbours_of(scaling="batch_max", allow_noncertified=True),
    ),
    "joint factor without squares": Broken(
        "neighbours", lambda: neighbours_of(scaling="joint"),
        under(lambda: patched((radii, "Joint", SumsWithoutSquares)), lambda: neighbours_of(scaling="joint")),
    ),
    "the layer's norm without its bias": Broken(
        "neighbours", layerwise,
        under(
            lambda: patched((ScaledLinear, "example_norms", norm_without_bias)),
            lambda: neighbours_of(scaling="layerwise"),
        ),
    ),
    "layerwise factor on the cotangent passed on": Broken(
        "neighbours", layerwise,
        under(
            lambda: patched((ScaledLinear, "forward", passes_its_factor_on)), lambda: neighbours_of(scaling="layerwise")
        ),
    ),
    "mean loss": Broken("scaling", scaling_of, lambda: scaling_of(mean_loss)),
    "dropout keyed by row": Broken(
        "scaling", lambda: scaling_of(build=with_dropout), lambda: scaling_of(keyed_by_row, build=with_dropout)
    ),
    **entries("sampling", sampling_of, SOUND_SAMPLER, {
        "fixed-size batches": fixed_size,
        "shuffled epochs": shuffled_epochs,
        "an empty sample is drawn again": never_empty,
        "each rank samples for itself": each_rank_for_itself,
        "N is read from the data": rate_of_the_rows,
        "twice the accounted rate": twice_the_rate,
        "every sample is used twice": same_sample_twice,
        "early rows are drawn more often": early_rows_more_often,
    }),
    "epsilon of a tenth of the steps": Broken(
        "accounting", lambda: stated(plan_of()), lambda: stated(plan_of(steps=500), of=plan_of())
    ),
    "replace-one with the epsilon of add/remove": Broken(
        "accounting", lambda: stated(plan_of(adjacency="replace_one")),
        lambda: stated(plan_of(adjacency="replace_one"), of=plan_of()),
    ),
    "two queries on one sample, one of them booked": Broken(
        "accounting", lambda: stated(tracked()), lambda: stated(tracked(), of=plan_of())
    ),
    "private means left out of the ledger": Broken(
        "accounting", lambda: stated(plan_of(preliminary=MEANS)),
        lambda: stated(plan_of(preliminary=MEANS), of=plan_of()),
    ),
    "inputs are not bounded": Broken(
        "bound", lambda: bound_of(our_implementation("worst_case")),
        lambda: bound_of(our_implementation("worst_case", module_kind=UnboundedInput)),
    ),
    "noise that ignores the certificate": Broken(
        "calibration", lambda: calibration_of(our_implementation("worst_case")),
        lambda: calibration_of(our_implementation("worst_case", kind=IgnoresTheBound)),
    ),
    "scaling by the batch maximum, black box": Broken(
        "additivity", lambda: additivity_of(our_implementation("layerwise")),
        lambda: additivity_of(our_implementation("batch_max")),
    ),
    "DP-SGD: no clipping": Broken("bound", lambda: bound_of(dp_sgd()), lambda: bound_of(dp_sgd("no clipping"))),
    **{
        f"DP-SGD: {fault}": Broken(
            "per example", lambda: per_example_of(dp_sgd()), lambda f=fault: per_example_of(dp_sgd(f))
        )
        for fault in ("the mini-batch is clipped", "micro-batches are clipped")
    },
    **{
        f"DP-SGD: {fault}": Broken(
            "calibration", lambda: calibration_of(dp_sgd()), lambda f=fault: calibration_of(dp_sgd(f))
        )
        for fault in (
            "noise without the bound", "no noise", "noise is divided by the batch twice", "a fixed seed",
            "noise on the first layer only", "the variance is taken for the deviation",
            "Laplace noise of the same variance",
        )
    },
    **{
        f"DP-SGD: {fault}": Broken(
            "depth, black box", lambda: black_box_depth_of(""), lambda f=fault: black_box_depth_of(f)
        )
        for fault in ("each layer is clipped to the whole bound", "coordinates are clipped")
    },
    "DP-SGD: inputs are scaled by the batch's largest": Broken(
        "additivity", lambda: additivity_of(dp_sgd()),
        lambda: additivity_of(dp_sgd("inputs are scaled by the batch's largest")),
    ),
}  # fmt: skip


def tracked() -> PrivacyPlan:
    return plan_of(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=1.0)
