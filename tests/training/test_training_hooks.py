"""What user code sees in a real Trainer, and in which order things happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from small_runs import Gradients, fit, make_module, make_network, make_plan, weights
from torch import Tensor, nn

from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.training import PrivateModule, PrivateStrategy


class LateNoise(PrivateStrategy):
    """Broken on purpose: noise enters after the closure's hooks, as a callback would do it."""

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        return DDPStrategy.backward(self, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        step = self.lightning_module.trainer.global_step

        def noised() -> Any:
            result = closure()
            self.mechanism.privatize_(step, None, self._seal)
            self.current.mark_released()
            return result

        return super().optimizer_step(optimizer, noised, model, **kwargs)


class ClipsGradients(PrivateModule):
    """Records what its gradient clipping is given."""

    seen: list[Tensor]

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        self.seen.append(torch.cat([p.grad.double().flatten() for p in self.parameters()]))
        self.clip_gradients(optimizer, **options)


def raw_sum_of_first_step() -> Tensor:
    """The true gradient of the first step: the same secret draws the same sample, without noise."""
    seen = Gradients()
    fit(make_plan(steps=1, noise_multiplier=0.0), seen)
    assert seen.after_backward[0] is not None
    return seen.after_backward[0]


@pytest.fixture(scope="module")
def raw() -> Tensor:
    return raw_sum_of_first_step()


def noise_in(seen: Tensor, raw: Tensor, trainer: Any) -> list[float]:
    """Per group, the root mean square of seen - raw in units of the noise that should be there."""
    mechanism = trainer.strategy.mechanism
    difference = (seen - raw) * mechanism.plan.expected_batch_size
    ratios, offset = [], 0
    for group in mechanism.certificate.groups:
        part = difference[offset : offset + group.numel]
        ratios.append(float(part.square().mean().sqrt()) / mechanism.deviations()[group.name])
        offset += group.numel
    return ratios


@pytest.mark.parametrize("kind", [PrivateStrategy, LateNoise])
def test_every_hook_that_sees_gradients_sees_noise(
    kind: type[PrivateStrategy], raw: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lipdp_lightning.training.model_checks.STRATEGY_METHODS", ())  # which would refuse the control
    seen = Gradients()
    module = make_module(kind=ClipsGradients)
    module.seen = []
    _, trainer = fit(
        make_plan(steps=1), seen, module=module, strategy_kind=kind, trainer_options={"gradient_clip_val": 1e9}
    )
    for found in (seen.before_step[0], module.seen[0]):
        assert all(0.5 < ratio < 1.6 for ratio in noise_in(found, raw, trainer))
    if kind is LateNoise:
        true_sum = raw * trainer.strategy.plan.expected_batch_size
        assert torch.allclose(seen.after_backward[0], true_sum, atol=1e-5), "the control shows no raw gradients"
    else:
        ratios = noise_in(seen.after_backward[0], raw, trainer)
        assert all(0.5 < ratio < 1.6 for ratio in ratios)
        assert torch.equal(seen.after_backward[0], seen.before_step[0])


def test_between_micro_batches_no_gradient_is_to_be_found() -> None:
    seen = Gradients()
    fit(make_plan(steps=4), seen, physical_batch_size=7)  # three micro-batches
    assert [g is None for g in seen.after_backward] == [True, True, False] * 4
    assert len(seen.before_step) == 4


def test_gradient_clipping_acts_on_private_gradients() -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
            grads = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
            self.norms.append(float(grads.norm()))

    clipped = Norms()
    fit(make_plan(steps=3), clipped, trainer_options={"gradient_clip_val": 1e-3})
    assert clipped.norms == pytest.approx([1e-3] * 3, rel=1e-3)


# ---- projection


class LayerNorms(Callback):
    """Norms of the layers when a batch has ended (checkpoints are written then) and in each forward pass."""

    def __init__(self) -> None:
        self.at_end: list[float] = []
        self.in_forward: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: PrivateModule) -> None:
        for layer in pl_module.network:
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(
                    TrustedHook(lambda m, _: self.in_forward.append(float(torch.linalg.norm(m.weight, 2))))
                )

    def on_train_batch_end(self, trainer: Any, pl_module: PrivateModule, *_: Any) -> None:
        self.at_end += [float(torch.linalg.norm(m.weight, 2)) for m in pl_module.network if isinstance(m, nn.Linear)]


class NoProjection(PrivateStrategy):
    """Broken on purpose: weights stay where the optimizer put them."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.mechanism.project_ = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [PrivateStrategy, NoProjection])
def test_weights_are_projected_before_checkpoints_and_the_next_forward(kind: type[PrivateStrategy]) -> None:
    norms = LayerNorms()
    fit(make_plan(steps=5), norms, module=make_module(rate=5.0), strategy_kind=kind)
    assert len(norms.at_end) == 10 and len(norms.in_forward) == 10
    held = max([*norms.at_end, *norms.in_forward]) <= 1.0 + 1e-6
    assert held is (kind is PrivateStrategy)


def test_initial_weights_are_projected_too() -> None:
    network = make_network()
    with torch.no_grad():
        network[0].weight.mul_(50)
    norms = LayerNorms()
    fit(make_plan(steps=1), norms, module=make_module(network=network))
    assert max(norms.in_forward) <= 1.0 + 1e-6


# ---- accumulation


class MeanOfMicroBatches(PrivateModule):
    """Broken on purpose: Lightning's division by the number of micro-batches is left in."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint"])
def test_any_number_of_micro_batches_takes_the_same_steps(scaling: str) -> None:
    plan = make_plan(noise_multiplier=0.0, scaling=scaling)
    whole = weights(fit(plan)[0])
    for size, chunks in ((10, 2), (7, 3)):
        module, trainer = fit(plan, physical_batch_size=size)
        assert trainer.strategy.chunks == chunks and trainer.global_step == plan.steps
        assert torch.allclose(weights(module), whole, atol=1e-6, rtol=0)


def test_the_comparison_of_micro_batches_notices_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp_lightning.training.model_checks.FIXED_METHODS", ())
    plan = make_plan(noise_multiplier=0.0)
    whole = weights(fit(plan)[0])
    broken, _ = fit(plan, module=make_module(kind=MeanOfMicroBatches), physical_batch_size=7)
    assert not torch.allclose(weights(broken), whole, atol=1e-3, rtol=0)


def test_a_step_is_the_sum_of_scaled_gradients_over_the_declared_batch() -> None:
    seen = Gradients()
    plan = make_plan(steps=1, noise_multiplier=0.0, scaling="worst_case")
    module = make_module(rate=0.0)
    _, trainer = fit(plan, seen, module=module)
    data = trainer.datamodule
    ids = data._planned.draw(0, 0)
    assert 5 < len(ids) < 40
    x, y, _ = data._ready()[ids]
    loss = nn.functional.cross_entropy(module(x), y, reduction="sum")
    grads = torch.autograd.grad(loss, list(module.parameters()))
    expected = torch.cat([g.double().flatten() for g in grads]) / plan.expected_batch_size
    assert torch.allclose(seen.after_backward[0], expected, atol=1e-7)


@pytest.mark.parametrize("size", [None, 1])
def test_an_empty_sample_is_a_step_like_any_other(size: int | None) -> None:
    """Expected batch size 2 of 60: several of the samples of this secret are empty."""
    seen = Gradients()
    plan = make_plan(expected_batch_size=2, steps=40)
    module, trainer = fit(plan, seen, module=make_module(rate=0.01), physical_batch_size=size)
    draws = [
        sum(len(trainer.datamodule._planned.draw(s, c)) for c in range(trainer.strategy.chunks)) for s in range(40)
    ]
    assert 0 in draws, "choose another secret: no sample was empty"
    assert trainer.global_step == 40 and len(seen.before_step) == 40
    assert all(g is not None and g.abs().max() > 0 for g in seen.before_step)
    assert torch.isfinite(weights(module)).all()
