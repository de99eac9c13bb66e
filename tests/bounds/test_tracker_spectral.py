"""The tracker's second bound, by the spectral norm of the whole change, along paths that look for its weak points."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds import Certifier, changes
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.bounds.norms import NormEntry, NormTracker, conv_norm, dense_norm, kappa
from lipdp_lightning.bounds.tracked import TrackedNorms

SIZE = 4


class Counting:
    def __init__(self, norm: Callable[[Tensor], float] = dense_norm) -> None:
        self.calls, self.norm = 0, norm

    def __call__(self, weight: Tensor) -> float:
        self.calls += 1
        return self.norm(weight)


def conv_truth(kernel: Tensor, groups: int = 1) -> float:
    inputs = kernel.shape[1] * groups
    layer = nn.Conv2d(inputs, kernel.shape[0], 3, padding=1, bias=False, groups=groups).double()
    layer.weight.data.copy_(kernel)
    count = inputs * SIZE**2
    with torch.no_grad():
        operator = layer(torch.eye(count, dtype=torch.float64).reshape(count, inputs, SIZE, SIZE)).flatten(1)
    return float(torch.linalg.svdvals(operator)[0])


def dense_truth(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.double())[0])


def conv_entry(kernel: Tensor, factor: float | None = None, groups: int = 1) -> NormEntry:
    exact = partial(conv_norm, padding=1, input_size=SIZE, groups=groups)
    return NormEntry(kernel, exact, kappa((3, 3), padding=1) if factor is None else factor, "conv", groups)


def noisy(weight: Tensor, size: float, generator: torch.Generator) -> None:
    noise = torch.randn(weight.shape, generator=generator)
    weight.add_((size * noise).to(weight.dtype))


def constant_direction(factor: float | None) -> float:
    """Smallest bound / truth while a kernel grows along the constant kernel, the worst direction for kappa, and
    noise, which has a large Frobenius norm, makes the tracker ask for the second bound."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.zeros(32, 32, 3, 3)
    kernel[:, :, 1, 1] = 1.0 / 32
    followed = NormTracker([conv_entry(kernel, factor)], slack=1.5)
    ratios = []
    for _ in range(28):
        kernel.add_(0.005 / 32)
        noisy(kernel, 0.003, generator)
        ratios.append(followed.update()[0] / conv_truth(kernel))
    assert followed.tightenings > 0
    return min(ratios)


def test_growing_kernel_never_below_the_truth() -> None:
    assert constant_direction(None) >= 1.0 - 1e-9


def test_second_bound_without_kappa_fails_the_same_check() -> None:
    assert constant_direction(1.0) < 1.0 - 1e-2


def aligned_growth(monkeypatch: pytest.MonkeyPatch | None, change: Callable[..., float] | None = None) -> float:
    """Smallest bound / truth while a weight grows along its first singular vectors: no bound has slack."""
    if monkeypatch is not None:
        monkeypatch.setattr(changes, "quick_norm", change)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(64, 1, generator=generator), torch.randn(1, 128, generator=generator)
    weight = left @ right / (left.norm() * right.norm())
    direction, ratios = weight.clone(), []
    followed = NormTracker([NormEntry(weight, dense_norm, groups=1)], slack=0.5)
    for _ in range(60):
        weight.add_(0.003 * direction)
        noisy(weight, 1e-3, generator)
        ratios.append(followed.update()[0] / dense_truth(weight))
    assert followed.tightenings > 0
    return min(ratios)


def test_growing_matrix_never_below_the_truth() -> None:
    assert aligned_growth(None) >= 1.0 - 1e-12


def test_change_bounded_by_power_iteration_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower_bound(matrices: Tensor, strip: int | None) -> float:
        return float(torch.linalg.vector_norm(matrices.sum(-1))) / math.sqrt(matrices.shape[-1])

    assert aligned_growth(monkeypatch, lower_bound) < 1.0 - 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_walk_with_clipping_never_below_the_truth(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(30, 50, generator=generator).to(dtype)
    kernel = torch.randn(6, 4, 3, 3, generator=generator).to(dtype)
    grouped = torch.randn(6, 2, 3, 3, generator=generator).to(dtype)
    entries = [NormEntry(dense, dense_norm, groups=1), conv_entry(kernel), conv_entry(grouped, groups=3)]
    followed = NormTracker(entries, slack=0.2)
    truths: list[Callable[[], float]] = [
        lambda: dense_truth(dense), lambda: conv_truth(kernel.double()), lambda: conv_truth(grouped.double(), 3)
    ]  # fmt: skip
    for _ in range(60):
        for bound, truth in zip(followed.clip([1.0, 0.5, None]), truths, strict=True):
            assert truth() * (1 - 1e-12) <= bound
        for bound, truth, most in zip(followed.update(), truths, (1.0, 0.5, math.inf), strict=True):
            assert truth() * (1 - 1e-12) <= bound <= min(truth() * 1.25 * 1.2, most) * (1 + 1e-4)
        for weight, size in ((dense, 1e-3), (kernel, 1e-3), (grouped, 1e-2)):
            noisy(weight, size, generator)
    assert followed.tightenings > 1


def test_fewer_exact_norms_for_changes_that_resemble_noise() -> None:
    counts = []
    for groups in (None, 1):
        generator = torch.Generator().manual_seed(0)
        weight, counter = torch.randn(128, 256, generator=generator), Counting()
        followed = NormTracker([NormEntry(weight, counter, groups=groups)], slack=0.1)
        for _ in range(100):
            noisy(weight, 0.0075, generator)
            assert dense_truth(weight) <= followed.update()[0] <= 1.12 * dense_truth(weight)
        counts.append(counter.calls)
    assert counts[1] * 3 < counts[0]


def test_entries_without_groups_never_use_the_second_bound() -> None:
    """||D||_F may be attained where ``groups`` is not given: here the weight acts as one long vector."""
    weight, counter = torch.eye(8), Counting(lambda w: float(torch.linalg.vector_norm(w.double())) * (1 + 1e-12))
    followed = NormTracker([NormEntry(weight, counter)], slack=0.3)
    for _ in range(30):
        weight.add_(0.02 * torch.eye(8))
        assert followed.update()[0] >= float(torch.linalg.vector_norm(weight.double()))
    assert followed.tightenings == 0 and counter.calls > 1


@pytest.mark.parametrize("groups", [1, 3])
def test_change_is_bounded_group_by_group(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are those of the groups, rows of the kernel and whole: other shapes have other norms."""
    kernel = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []

    def recorded(matrices: Tensor, strip: int | None) -> float:
        seen.append(matrices.clone())
        return math.inf

    monkeypatch.setattr(changes, "quick_norm", recorded)
    followed = NormTracker([conv_entry(kernel, groups=groups)], slack=0.1)
    before = kernel.clone()
    kernel.mul_(2.0)
    followed.update()
    moved = (kernel - before).chunk(groups)
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.stack([change.flatten(1) for change in moved]))


def test_layers_that_drift_alike_are_not_all_certified_in_one_step() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(32, 32, generator=generator)
    weights = [start.clone() for _ in range(12)]
    followed = NormTracker([NormEntry(w, dense_norm, groups=1) for w in weights], slack=0.1)
    most, before = 0, followed.refreshes
    for _ in range(200):
        noise = 0.004 * torch.randn(start.shape, generator=generator)
        for weight in weights:
            weight.add_(noise)
        followed.update()
        most, before = max(most, followed.refreshes - before), followed.refreshes
    assert min(followed.refresh_counts) >= 2
    assert most <= 8


def test_a_write_that_leaves_no_trace_after_clipping_is_noticed() -> None:
    """``.data`` does not count versions: what clip measured must not be taken for the present."""
    layer = nn.Linear(20, 20, bias=False)
    followed = NormTracker([NormEntry(layer.weight, dense_norm, groups=1)], slack=0.1)
    followed.clip([0.5])
    version = layer.weight._version
    layer.weight.data.mul_(3.0)
    assert layer.weight._version == version
    assert followed.update()[0] >= dense_truth(layer.weight.detach()) > 1.0


def test_after_refreshing_all_nothing_is_left_of_the_past() -> None:
    def weights() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(20, 30, generator=generator), torch.randn(4, 3, 3, 3, generator=generator)]

    def entries(of: list[Tensor]) -> list[NormEntry]:
        return [NormEntry(of[0], dense_norm, groups=1), conv_entry(of[1])]

    old = weights()
    worn = NormTracker(entries(old), slack=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(25):
        for weight in old:
            noisy(weight, 2e-3, generator)
        worn.clip([1.0, 1.0])
    assert worn.tightenings > 0
    for index in range(2):
        worn.refresh(index)
    new = [weight.clone() for weight in old]
    fresh = NormTracker(entries(new), slack=0.1)
    for _ in range(25):
        noise = [2e-3 * torch.randn(w.shape, generator=generator) for w in old]
        for weight, change in zip([*old, *new], [*noise, *noise], strict=True):
            weight.add_(change)
        assert worn.clip([1.0, 1.0]) == fresh.clip([1.0, 1.0])
        assert worn.update() == fresh.update()
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def test_many_scalings_cost_no_accuracy() -> None:
    """A scaled anchor is not rounded again and again: the bound stays as close as one rounding allows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 16, generator=generator)
    counter = Counting()
    followed = NormTracker([NormEntry(weight, counter, groups=1)], slack=0.1)
    for step in range(400):
        weight.mul_(factor := 0.99 if step % 2 else 1 / 0.99)
        followed.rescale(0, factor)
        assert dense_truth(weight) <= followed.update()[0] <= dense_truth(weight) * (1 + 1e-4)
    assert counter.calls == 1


def test_scaling_after_a_second_bound_needs_no_new_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, counter = torch.randn(64, 128, generator=generator), Counting()
    followed = NormTracker([NormEntry(weight, counter, groups=1)], slack=0.1)
    while followed.tightenings == 0:
        noisy(weight, 2e-3, generator)
        bound = followed.update()[0]
    weight.mul_(0.5)
    followed.rescale(0, 0.5)
    assert followed.update()[0] == pytest.approx(0.5 * bound, rel=1e-4)
    assert (counter.calls, followed.tightenings) == (1, 1)


@pytest.mark.parametrize("sound", [True, False])
def test_rounding_of_a_scaled_anchor_counts_in_the_second_bound(sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 is larger in float32: a tenth of the anchor, subtracted, leaves too little. The rest is exact here."""
    monkeypatch.setattr(changes, "quick_norm", lambda matrices, strip: dense_truth(matrices[0]))
    weight = torch.eye(16)
    followed = NormTracker([NormEntry(weight, dense_norm, groups=1)], slack=1e-4)
    if not sound:
        monkeypatch.setattr("lipdp_lightning.bounds.deviations.Reference.rounding", lambda self: 0.0)
    weight.mul_(0.1)
    followed.rescale(0, 0.1)
    weight.add_(3e-6 * torch.eye(16))
    bound = followed.update()[0]
    assert followed.tightenings == 1
    assert (bound >= dense_truth(weight)) is sound


def test_scaling_to_nothing_is_certified_anew() -> None:
    weight, counter = torch.eye(3), Counting()
    followed = NormTracker([NormEntry(weight, counter, groups=1)])
    weight.zero_()
    followed.rescale(0, 0.0)
    assert followed.update() == [0.0] and counter.calls == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights_are_refused_by_name(value: float) -> None:
    weight = torch.eye(3)
    exact = partial(dense_norm, name="head")
    followed = NormTracker([NormEntry(weight, exact, name="head", groups=1)], slack=1e9)
    weight[0, 0] = value
    with pytest.raises(ValueError, match=r"(?s)head.*HINT"):
        followed.update()


def test_norms_known_beforehand_are_taken_over_only_for_unchanged_weights() -> None:
    weights = [torch.eye(3), 2.0 * torch.eye(3), torch.eye(3)]
    known = [(w.clone(), dense_norm(w)) for w in weights]
    counters = [Counting() for _ in weights]
    weights[1].mul_(2.0)
    weights[2] = weights[2].double()
    entries = [NormEntry(w, c, groups=1) for w, c in zip(weights, counters, strict=True)]
    followed = NormTracker(entries, known=known)
    assert [c.calls for c in counters] == [0, 1, 1]
    assert followed.update() == pytest.approx([1.0, 4.0, 1.0])


# Through a Certifier


def served(model: nn.Module, shape: tuple[int, ...]) -> tuple[Certifier, TrackedNorms]:
    norms = TrackedNorms()
    certifier = Certifier(model, shape, 1.0, CrossEntropy(), norms=norms)
    certifier.certify()
    certifier.certify()
    return certifier, norms


def test_linear_and_convolution_layers_use_the_second_bound_and_stay_above_the_exact_one() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 18, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(288, 64), nn.Tanh(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers)
    certifier, norms = served(model, (4, SIZE, SIZE))
    assert norms.tracker is not None
    assert [entry.groups for entry in norms.tracker.entries] == [2, 1, 1]
    assert norms.tracker.refreshes == 0  # the first walk's norms are taken over
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        with torch.no_grad():
            noisy(model[0].weight, 2e-3, generator)
            noisy(model[2].weight, 3e-4, generator)
        exact = Certifier(model, (4, SIZE, SIZE), 1.0, CrossEntropy()).certify()
        for tracked_group, exact_group in zip(certifier.certify().groups, exact.groups, strict=True):
            assert tracked_group.worst_case >= exact_group.worst_case * (1 - 1e-2)  # exact ones are 0.1 % apart
    assert norms.tracker.tightenings > 0


def test_a_rule_that_promises_no_more_than_the_frobenius_norm_gets_no_second_bound() -> None:
    norms: Any = TrackedNorms()
    weight = torch.eye(4)
    norms.begin()
    norms.operator_norm(weight, lambda: float(torch.linalg.vector_norm(weight)), 1.0)
    norms.begin()
    assert norms.tracker.entries[0].groups is None
