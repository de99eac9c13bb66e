"""The order, the state and the noise of one step: lipdp_lightning/mechanism/step.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from private_step import (
    SECRET,
    Branched,
    Harness,
    Noiseless,
    influential_examples,
    linear,
    make_network,
    make_plan,
    mlp,
    random_batch,
    strongest,
    with_example,
)  # fmt: skip
from scipy import stats
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.kernels.normals import normals
from lipdp_lightning.mechanism.allocation import sum_margin
from lipdp_lightning.mechanism.noise import Place, StepNoise
from lipdp_lightning.mechanism.radii import Radius
from lipdp_lightning.mechanism.step import Mechanism

CLASSES = 5
EMPTY = tuple(t[:0] for t in random_batch(2, (12,), CLASSES))


def noisy(network: nn.Module | None = None, kind: type[Mechanism] = Mechanism, **options: Any) -> Harness:
    """Always the same network unless one is given; options of the plan and of the harness."""
    own = {k: options.pop(k) for k in ("secret", "context", "place", "chunks", "grid") if k in options}
    torch.manual_seed(0)
    plan = make_plan(**{"scaling": "layerwise"} | options)
    return Harness(mlp() if network is None else network, (12,), plan, kind=kind, **own)


def flat(released: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(released.values()))


def noise_of(harness: Harness, step: int = 0) -> Tensor:
    """A step on an empty sample, times its divisor."""
    noise = flat(harness.release(EMPTY, step)) * harness.plan.expected_batch_size
    harness.mechanism.close()
    return noise


# ---- what is released


def test_release_is_the_sum_and_the_noise_over_the_declared_batch_size() -> None:
    batch = random_batch(13, (12,), CLASSES)
    true_sum = flat(noisy(kind=Noiseless).release(batch))
    released = flat(noisy(grid=False).release(batch))
    noise = noise_of(noisy(grid=False))
    assert torch.allclose(released * 20, true_sum + noise, rtol=1e-4, atol=1e-5)
    assert noise.std() > 0.1


@pytest.mark.parametrize("size", [0, 1, 57])
def test_divisor_is_declared_and_does_not_follow_the_sample(size: int) -> None:
    batch = random_batch(57, (12,), CLASSES)
    part = tuple(t[:size] for t in batch)
    released, true_sum = flat(noisy().release(part)), flat(noisy(kind=Noiseless).release(part))
    ratio = (released * 20 - true_sum).std() / noise_of(noisy()).std()
    assert ratio.item() == pytest.approx(1, abs=1e-3)


def test_batch_max_alone_divides_by_the_drawn_examples() -> None:
    batch = random_batch(8, (12,), CLASSES)
    harness = noisy(scaling="batch_max", allow_noncertified=True)
    harness.accumulate(batch)
    assert harness.mechanism.divisor() == 8.0
    harness.mechanism.privatize_(0)
    harness.accumulate(EMPTY, 1)
    assert harness.mechanism.divisor() == 1.0
    layerwise = noisy()
    layerwise.accumulate(batch)
    assert layerwise.mechanism.divisor() == 20.0


def test_an_empty_sample_releases_noise_of_the_full_size() -> None:
    for chunks in (1, 3):
        harness = noisy(chunks=chunks)
        released = harness.release(EMPTY)
        deviations = harness.mechanism.deviations()
        for name, values in released.items():
            assert (values * 20 / deviations[name]).std().item() == pytest.approx(1, abs=0.25)
        harness.mechanism.close()


def test_a_rank_without_gradients_contributes_noise_and_zeros() -> None:
    """No forward pass at all: grad is None everywhere, and the release is that of an empty sample."""
    harness = noisy()
    harness.mechanism.begin_step(0)
    assert all(p.grad is None for p in harness.module.parameters())
    harness.mechanism.privatize_(0)
    assert torch.equal(flat(harness.gradients()) * 20, noise_of(noisy()))


@pytest.mark.parametrize("mode", ["distributed", "replicated"])
def test_ranks_release_the_sum_of_one_process(mode: Any) -> None:
    """Two processes in turn, the second without examples of the first: same sum, noise of the same variance."""
    batch = random_batch(10, (12,), CLASSES)
    whole = flat(noisy(kind=Noiseless).release(batch))
    first, second = (noisy(place=Place(rank, 2, mode)) for rank in (0, 1))
    totals: list[Tensor] = []
    first.accumulate(tuple(t[:10:2] for t in batch))
    second.accumulate(tuple(t[1::2] for t in batch))
    first.mechanism.privatize_(0, lambda total: totals.append(total.clone()))
    second.mechanism.privatize_(0, lambda total: totals.append(total.clone()))

    def released(harness: Harness) -> Tensor:
        harness.accumulate(tuple(t[harness.mechanism.place.rank :: 2] for t in batch), 0)
        harness.mechanism.privatize_(0, lambda total: total.copy_(totals[0] + totals[1]))
        return flat(harness.gradients()) * 20

    results = [released(first), released(second)]
    assert torch.equal(results[0], results[1])
    deviations = first.mechanism.deviations()
    noise = ((results[0] - whole) / deviations["1"]).numpy()  # allocation global: one deviation
    assert stats.kstest(noise, "norm").pvalue > 1e-3 and noise.std() == pytest.approx(1, abs=0.15)
    summed = torch.stack(totals).sum(0)
    if mode == "replicated":  # what is reduced holds no noise, and is added to one draw
        assert torch.allclose(summed, whole, atol=1e-4)
    else:  # no process held a sum without noise
        own = flat(noisy(kind=Noiseless).release(tuple(t[::2] for t in batch)))
        assert (totals[0] - own).std() > 0.5 * deviations["1"] / math.sqrt(2)
    first.mechanism.close(), second.mechanism.close()


def test_micro_batches_release_what_one_batch_does() -> None:
    batch = random_batch(17, (12,), CLASSES)
    for scaling in ("worst_case", "layerwise", "joint"):
        one, three = (flat(noisy(scaling=scaling, chunks=k).release(batch)) for k in (1, 3))
        assert torch.allclose(one, three, rtol=1e-4, atol=1e-6)
    # the maximum over a micro-batch is not that over the batch
    options = {"scaling": "batch_max", "allow_noncertified": True}
    assert not torch.allclose(*(flat(noisy(chunks=k, **options).release(batch)) for k in (1, 3)), rtol=1e-4)


# ---- the certificate is that of the weights used


def test_weights_that_change_before_the_noise_are_an_error() -> None:
    harness = noisy()
    harness.accumulate(random_batch(4, (12,), CLASSES))
    with torch.no_grad():
        harness.module.network[1].weight.mul_(0.01)
    with pytest.raises(AssertionError, match="weights changed"):
        harness.mechanism.privatize_(0)


def test_a_step_has_to_begin_and_has_its_own_number() -> None:
    harness = noisy()
    with pytest.raises(AssertionError, match="without begin_step"):
        harness.mechanism.privatize_(0)
    harness.accumulate(EMPTY, 3)
    with pytest.raises(AssertionError, match="without begin_step"):
        harness.mechanism.privatize_(4)
    harness.mechanism.privatize_(3)
    with pytest.raises(AssertionError, match="without begin_step"):
        harness.mechanism.privatize_(3)  # the same noise on a second sum


def test_weights_that_change_between_micro_batches_are_an_error() -> None:
    """Certifying anew would cover the first micro-batch's gradients with bounds of other weights."""
    harness = noisy()
    harness.accumulate(random_batch(4, (12,), CLASSES))
    with torch.no_grad():
        harness.module.network[3].weight.mul_(0.01)
    with pytest.raises(AssertionError, match="micro-batches"):
        harness.mechanism.begin_step(0)


class CertifiesLate(Noiseless):
    """Takes the certificate of the present weights when the noise is scaled, whatever the gradients came from."""

    def privatize_(self, step: int, reduce: Any = None, seal: Any = None) -> None:
        self._numbers = self.scaling.numbers(self.refresh_certificate())
        self._weights = self._digest.begin(self._state)
        super().privatize_(step, reduce, seal)


def covers_its_gradients(kind: type[Noiseless]) -> bool:
    """Gradients at large weights, weights shrunk, then noise: is one example's share covered by that noise?"""
    torch.manual_seed(0)
    network = mlp()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    harness = Harness(network, (12,), make_plan(max_norm=None), kind=kind)
    example = strongest(harness, influential_examples(harness, CLASSES))
    batch = with_example(EMPTY, *example)
    harness.accumulate(batch, 100)
    own = harness.gradients()
    with torch.no_grad():
        network[5].weight.mul_(0.01)
        network[3].weight.mul_(0.01)
    try:
        harness.mechanism.privatize_(100)
    except AssertionError:
        return True  # nothing was released
    claimed = harness.mechanism.deviations()
    harness.mechanism.close()
    share = sum((own[n].norm().item() / claimed[n]) ** 2 for n in own if claimed[n] > 0)
    return share <= (1 + 1e-5) / harness.plan.noise_multiplier**2


def test_certificate_of_new_weights_for_old_gradients_is_caught() -> None:
    assert covers_its_gradients(Noiseless)
    assert not covers_its_gradients(CertifiesLate)


def test_what_is_trained_may_not_change_after_set_up() -> None:
    """A thawed layer would hand its raw gradient to the optimizer; a frozen one would shift every segment."""
    network = mlp()
    network[3].weight.requires_grad_(False)
    network[3].bias.requires_grad_(False)
    harness = noisy(network)
    harness.release(random_batch(4, (12,), CLASSES))
    network[3].weight.requires_grad_(True)
    network[3].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="what is trained changed") as refusal:
        harness.mechanism.begin_step(1)
    assert "3:" in str(refusal.value) and "HINT" in str(refusal.value)
    frozen = noisy()
    frozen.module.network[5].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="what is trained changed"):
        frozen.mechanism.begin_step(0)


def test_shares_that_match_no_group_are_refused_at_set_up() -> None:
    with pytest.raises(ValueError, match="'embedding' matches no group"):
        noisy(allocation="custom", group_weights=[["embedding", 1.0], ["*", 3.0]])
    harness = noisy(allocation="custom", group_weights=[["1", 1.0], ["*", 3.0]])
    claimed, deltas = harness.mechanism.deviations(), harness.mechanism.sensitivities()
    share = (harness.plan.noise_multiplier * deltas["1"] / claimed["1"]) ** 2
    assert share == pytest.approx(1 / 4)  # shares are relative


# ---- the state a step starts from


def test_the_same_state_repeats_the_same_bits() -> None:
    assert torch.equal(noise_of(noisy()), noise_of(noisy()))
    tracked = {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 4.0}
    assert torch.equal(noise_of(noisy(**tracked)), noise_of(noisy(**tracked)))


def changed_weights() -> nn.Module:
    torch.manual_seed(0)
    network = mlp()
    with torch.no_grad():
        network[5].bias[0] = torch.nextafter(network[5].bias[0], torch.tensor(1.0))
    return network


class WithBuffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = mlp()
        self.register_buffer("scale", torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


VARIANTS: dict[str, Any] = {
    "another number of steps": lambda: noisy(steps=51),
    "another delta": lambda: noisy(delta=2e-5),
    "another context": lambda: noisy(context=b"another data fingerprint"),
    "one bit of one weight": lambda: noisy(changed_weights()),
    "another secret": lambda: noisy(secret=bytes(16)),
    "secure noise": lambda: noisy(secure=True),
    "another scaling": lambda: noisy(scaling="joint"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_state_draws_fresh_noise(variant: str) -> None:
    base, other = noise_of(noisy()), noise_of(VARIANTS[variant]())
    correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(len(base))


def wide() -> nn.Module:
    """Its second layer is large enough for its norm to be followed, and not to be taken anew in every step."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, CLASSES)]
    return nn.Sequential(*layers)


def test_buffers_radii_and_bounds_are_part_of_the_state() -> None:
    def digest(harness: Harness) -> bytes:
        harness.mechanism.begin_step(0)
        harness.mechanism.close()
        return harness.mechanism.digest

    assert digest(noisy(WithBuffer(1.0))) == digest(noisy(WithBuffer(1.0)))
    assert digest(noisy(WithBuffer(1.0))) != digest(noisy(WithBuffer(2.0)))
    radii = [noisy(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=4.0) for _ in range(2)]
    radii[1].mechanism.load_state({"1": 1.5})
    assert digest(radii[0]) != digest(radii[1])
    # the same weights, under bounds taken at other ones: other factors, and the same draw at another scale
    lagging = noisy(wide(), max_norm=None)
    lagging.mechanism.begin_step(0)
    with torch.no_grad():
        lagging.module.network[3].weight.mul_(1.001)
    network = wide()
    with torch.no_grad():
        network[3].weight.mul_(1.001)
    settled = noisy(network, max_norm=None)
    lagging.mechanism.begin_step(1)
    assert torch.equal(lagging.module.network[3].weight, network[3].weight)
    settled.mechanism.begin_step(1)
    assert settled.mechanism.deviations() != lagging.mechanism.deviations()
    assert settled.mechanism.digest != lagging.mechanism.digest
    settled.mechanism.close(), lagging.mechanism.close()


def test_noise_of_steps_groups_and_ranks_is_independent() -> None:
    base = noise_of(noisy())
    limit = 4 / math.sqrt(len(base))
    others = [noise_of(noisy(), 1), noise_of(noisy(place=Place(1, 2)))]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < limit
    sizes = [g.numel for g in noisy().mechanism.certificate.groups]
    first, second = base.split(sizes)[:2]
    count = min(len(first), len(second))
    pair = torch.corrcoef(torch.stack([first[:count], second[:count]]))
    assert abs(pair[0, 1].item()) < 4 / math.sqrt(count)


# ---- the noise


@pytest.mark.parametrize("options", [{"allocation": "equal"}, {"allocation": "optimal", "secure": True}])
def test_noise_of_every_group_is_normal_with_its_deviation(options: dict[str, Any]) -> None:
    """KS and variance per group over many steps of a fixed secret, through the float32 gradients."""
    harness = noisy(**options)
    draws: dict[str, list[Tensor]] = {}
    for step in range(60):
        for name, values in harness.release(EMPTY, step).items():
            draws.setdefault(name, []).append(values * 20)
    deviations = harness.mechanism.deviations()
    assert len(set(deviations.values())) == 3
    for name, parts in draws.items():
        sample = torch.cat(parts) / deviations[name]
        assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-4
        assert abs(sample.var().item() - 1) < 5 * math.sqrt(2 / len(sample))
    harness.mechanism.close()


def test_noise_reaches_the_tails_that_float32_normals_lack() -> None:
    """Beyond 5.77 deviations, with the law's frequency; in 4e6 draws beyond 4.5 already (27 expected)."""
    draws = normals(StepNoise.of(SECRET, 0, Place(), bytes(32)).key, 0, 0, 4_000_000)
    assert draws.dtype == torch.float64
    expected = 4_000_000 * 2 * stats.norm.sf(4.5)
    assert abs((draws.abs() > 4.5).sum().item() - expected) < 4 * math.sqrt(expected)
    smallest = math.sqrt(-2 * math.log(2.0**-63))
    assert smallest > 9.3  # of the 63-bit uniforms behind them; a 24-bit uniform ends at 5.77
    assert math.sqrt(-2 * math.log(2.0**-24)) < 5.78


def test_secure_noise_is_used_when_the_plan_asks_for_it() -> None:
    plain, secure = noise_of(noisy()), noise_of(noisy(secure=True))
    assert not torch.equal(plain, secure)
    assert secure.std().item() == pytest.approx(plain.std().item(), rel=0.2)


def test_a_group_that_cannot_move_gets_no_noise_and_keeps_its_value() -> None:
    """Behind a zero last layer no gradient is possible: those groups stay exactly where they are."""
    network = mlp()
    nn.init.zeros_(network[5].weight)
    harness = noisy(network, allocation="equal")
    before = [p.detach().clone() for p in network.parameters()]
    released = harness.release(random_batch(9, (12,), CLASSES))
    assert harness.mechanism.deviations()["1"] == 0.0 and harness.mechanism.deviations()["5"] > 0
    # K counts the groups that can move: one
    delta = harness.mechanism.sensitivities()["5"]
    assert harness.mechanism.deviations()["5"] == pytest.approx(harness.plan.noise_multiplier * delta)
    assert released["1"].abs().max() == 0 and released["3"].abs().max() == 0
    torch.optim.SGD(network.parameters(), 1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(before[:4], list(network.parameters())[:4], strict=True))
    assert not torch.equal(before[5], network[5].bias)
    harness.mechanism.close()


def test_deviations_meet_the_condition_and_forget_no_root_of_the_group_count() -> None:
    for allocation in ("equal", "global", "optimal"):
        for scaling in ("worst_case", "layerwise"):
            harness = noisy(allocation=allocation, scaling=scaling)
            deltas, deviations = harness.mechanism.sensitivities(), harness.mechanism.deviations()
            release = sum((deltas[n] / deviations[n]) ** 2 for n in deltas)
            assert release == pytest.approx(1 / harness.plan.noise_multiplier**2)
            harness.mechanism.close()
    as_printed = noisy(scaling="batch_max", allow_noncertified=True)
    deltas, deviations = as_printed.mechanism.sensitivities(), as_printed.mechanism.deviations()
    assert sum((deltas[n] / deviations[n]) ** 2 for n in deltas) == pytest.approx(3 / 0.8**2)


def test_joint_noise_is_the_threshold_times_the_multiplier() -> None:
    harness = noisy(scaling="joint", allocation="equal")
    worst = harness.mechanism.certificate.sensitivities("worst_case")
    margin = sum_margin(harness.plan.expected_batch_size)
    assert 1 < margin < 1.0011
    for name, deviation in harness.mechanism.deviations().items():
        assert deviation == pytest.approx(0.8 * math.sqrt(3) * worst[name] * margin)


def test_a_plan_without_noise_releases_the_mean_over_the_declared_size() -> None:
    batch = random_batch(7, (12,), CLASSES)
    harness = noisy(noise_multiplier=0.0, allow_noncertified=True)
    released = flat(harness.release(batch))
    assert torch.allclose(released * 20, flat(noisy(kind=Noiseless).release(batch)), rtol=1e-5)


# ---- tracked radii


def test_votes_are_released_with_noise_of_their_own() -> None:
    """Two query families on one sample: the vector of K votes moves by sqrt(K)/2, and its noise says so."""
    plan = {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 3.0}
    harness = noisy(**plan)
    numbers = harness.mechanism.numbers()
    assert len(numbers.votes) == 3 and numbers.vote_deviation == 3.0 * math.sqrt(3) / 2
    assert harness.plan.step_noise_multiplier == pytest.approx(1 / math.sqrt(1 / 0.8**2 + 1 / 9))
    scaling = harness.mechanism.scaling
    assert isinstance(scaling, Radius)
    before = scaling.state()
    harness.release(random_batch(20, (12,), CLASSES))
    assert scaling.state() != before and harness.mechanism.state() == scaling.state()
    # on an empty sample they move by noise alone
    middle = scaling.state()
    harness.release(EMPTY, 1)
    assert scaling.state() != middle
    harness.mechanism.close()


def test_resumed_radii_continue_and_fixed_ones_stay() -> None:
    fixed = noisy(scaling="radius", radius=0.5)
    assert set(fixed.mechanism.state().values()) == {0.5}
    fixed.release(random_batch(20, (12,), CLASSES))
    assert set(fixed.mechanism.state().values()) == {0.5}
    assert noisy().mechanism.state() == {}


# ---- plumbing


def test_close_detaches_from_the_model() -> None:
    harness = noisy()
    assert harness.module.network[1].gradient_scaler is not None
    harness.mechanism.close()
    assert harness.module.network[1].gradient_scaler is None


def test_training_needs_a_follower() -> None:
    network = linear()
    with pytest.raises(AssertionError, match="Follower"):
        Mechanism(network, Certifier(network, (12,), 1.0, "cross_entropy"), make_plan(), SECRET)


def test_parameters_without_a_layer_are_released_too() -> None:
    harness = noisy(Branched(), scaling="joint")
    released = harness.release(random_batch(5, (12,), CLASSES))
    assert set(released) == {"trunk", "left", "right", "plain", "head"}
    assert all(p.grad is not None for p in harness.module.network.parameters())
    network, shape = make_network("tied")
    tied = Harness(network, shape, make_plan(scaling="layerwise"), kind=Mechanism)
    names = [n for g in tied.mechanism.certificate.groups for n in g.parameters]
    assert sorted(names) == sorted(n for n, _ in network.named_parameters())  # each tensor once
    harness.mechanism.close(), tied.mechanism.close()
