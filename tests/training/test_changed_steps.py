"""The private step is that of set-up: methods, loss, input bound and hooks that would reach it are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, BlobsWithValidation, fit, make_module, make_network, make_plan, weights
from torch import Tensor, nn

from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.layers import BoundedInput
from lipdp_lightning.training import PrivateModule

METHODS = (
    "__call__", "_call_impl", "forward", "training_step", "_summed_loss", "_views", "_key_dropout", "private_loss",
    "clip_loss", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward",
    "manual_backward", "optimizer_step", "optimizer_zero_grad", "toggle_optimizer", "clip_gradients",
)  # fmt: skip


def passing_on(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return method


@pytest.mark.parametrize("name", METHODS)
def test_a_subclass_or_an_instance_with_its_own_method_of_the_step_is_refused(name: str) -> None:
    kind = type("Own", (PrivateModule,), {name: passing_on(name)})
    with pytest.raises(ValueError, match=rf"Own.{name} replaces.*HINT"):
        fit(make_plan(steps=1), module=make_module(kind=kind))
    module = make_module()
    object.__setattr__(module, name, types.MethodType(lambda self, *a, **k: None, module))
    with pytest.raises(ValueError, match=rf"{name} replaces.*HINT"):
        fit(make_plan(steps=1), module=module)


def test_a_method_that_was_replaced_on_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateModule._summed_loss
    monkeypatch.setattr(PrivateModule, "_summed_loss", lambda *a: 100 * original(*a))
    with pytest.raises(ValueError, match=r"_summed_loss replaces.*HINT"):
        fit(make_plan(steps=1))


class At(Callback):
    """Does something in one of Lightning's hooks, at the second step."""

    def __init__(self, hook: str, action: Callable[..., Any]) -> None:
        setattr(self, hook, lambda trainer, module, *args: trainer.global_step == 1 and action(trainer, module, *args))
        self.released: list[int] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.released.append(trainer.global_step)


def _loud(*args: Any) -> Any:
    return 100 * args[-1]


def _second_backward(trainer: Any, module: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)


CHANGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "loss": ("on_train_batch_start", lambda t, m, *_: setattr(m, "loss", CrossEntropy(temperature=0.01))),
    "constant of the loss": (
        "on_train_batch_start", lambda t, m, *_: object.__setattr__(m.loss, "temperature", 0.01),
    ),
    "input bound": ("on_train_batch_start", lambda t, m, *_: setattr(m.bounded_input, "bound", 100.0)),
    "input mode": ("on_train_batch_start", lambda t, m, *_: setattr(m.bounded_input, "mode", "normalize")),
    "bounded input": ("on_train_batch_start", lambda t, m, *_: setattr(m, "bounded_input", BoundedInput(100.0))),
    "hook on the input": ("on_train_batch_start", lambda t, m, *_: m.bounded_input.register_forward_hook(_loud)),
    "network": ("on_train_batch_start", lambda t, m, *_: setattr(m, "network", make_network(1))),
    "hook on the network": ("on_train_batch_start", lambda t, m, *_: m.network.register_forward_hook(_loud)),
    "hook on a parameter": ("on_train_batch_start", lambda t, m, *_: m.network[0].weight.register_hook(_loud)),
    "forward": ("on_train_batch_start", lambda t, m, *_: setattr(m, "forward", lambda x: 100 * m.network(x))),
    "class": ("on_train_batch_start", lambda t, m, *_: setattr(m, "__class__", type("Own", (PrivateModule,), {}))),
    "summed loss": (
        "on_train_batch_start", lambda t, m, *_: setattr(m, "_summed_loss", lambda *a: m.network(a[0]).sum()),
    ),
    "zeroing": ("on_train_batch_start", lambda t, m, *_: setattr(m, "optimizer_zero_grad", lambda *a: None)),
    "step of the Strategy": (
        "on_train_batch_start", lambda t, m, *_: setattr(t.strategy, "backward", lambda loss, *a: loss.backward()),
    ),
    "transfer of the data": (
        "on_train_batch_start", lambda t, m, *_: setattr(t.datamodule, "on_after_batch_transfer", lambda b, i: b),
    ),
    "micro-batches": ("on_train_batch_start", lambda t, m, *_: setattr(t, "accumulate_grad_batches", 3)),
    "loss in place": ("on_before_backward", lambda t, m, loss: loss.mul_(100)),
    "hook on the loss": ("on_before_backward", lambda t, m, loss: loss.register_hook(_loud)),
    "second backward pass": ("on_before_backward", _second_backward),
    "scaler of a layer": (
        "on_before_backward", lambda t, m, loss: setattr(m.network[0], "gradient_scaler", lambda norms: 100 * norms),
    ),
    "weights replaced after it": (
        "on_before_backward", lambda t, m, loss: setattr(m.network[0].weight, "data", torch.zeros(8, 6)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_was_changed_releases_nothing(name: str) -> None:
    hook, action = CHANGES[name]
    at = At(hook, action)
    with pytest.raises((ValueError, AssertionError), match="HINT"):
        fit(make_plan(steps=3), at)
    assert at.released == [0]


# ---- harmless


class Logs(PrivateModule):
    """Overrides what only sees released values, or held-out data."""

    seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", sum(p.norm() for p in self.parameters()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += 1

    def on_after_backward(self) -> None:
        self.log("gradient", self.network[0].weight.grad.norm())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


def _ema(trainer: Any, module: Any, *_: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.0)


def _evaluate(trainer: Any, module: Any, *_: Any) -> None:
    module.eval()
    with torch.no_grad():
        module(torch.ones(2, 6))
    module.train()


HARMLESS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda t, m, *_: None,
    "average of weights": _ema,
    "evaluation": _evaluate,
    "state loaded in place": lambda t, m, *_: m.load_state_dict(m.state_dict()),
    "state_dict hook": lambda t, m, *_: m.network.register_state_dict_post_hook(lambda *_: None),
    "logging hook on the module": lambda t, m, *_: m.register_forward_hook(lambda mod, i, o: o.mul_(100)),
    "pre-hook on the module": lambda t, m, *_: m.register_forward_pre_hook(lambda mod, i: (100 * i[0],)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_sees_released_values_alone_changes_nothing(name: str) -> None:
    expected = weights(fit(make_plan(steps=3), module=make_module(kind=Logs))[0])
    module, trainer = fit(
        make_plan(steps=3), At("on_train_batch_start", HARMLESS[name]), module=make_module(kind=Logs),
        data=BlobsWithValidation(), trainer_options={"limit_val_batches": 1.0},
    )  # fmt: skip
    assert trainer.global_step == 3
    assert torch.equal(weights(module), expected)


def test_dropout_and_views_keep_their_way() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    _, trainer = fit(make_plan(steps=2), module=make_module(network=network), data=Blobs())
    assert trainer.global_step == 2
