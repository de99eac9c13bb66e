"""What is attached or replaced after set-up: a step that its certificate does not describe is not released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Gradients, fit, make_module, make_plan
from torch import nn


class At(Callback):
    """Changes the module at a moment of step 2."""

    def __init__(self, moment: str, change: Any) -> None:
        self.moment, self.change = moment, change

    def _at(self, moment: str, trainer: Any, module: Any) -> None:
        if moment == self.moment and trainer.global_step == 2:
            self.change(module.network)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._at("before the forward pass", trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._at("between forward and release", trainer, pl_module)


def louder(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 100 * output


def forward_hook(network: nn.Module) -> None:
    network[0].register_forward_hook(louder)  # type: ignore[operator, index]


def forward_hook_of_the_root(network: nn.Module) -> None:
    network.register_forward_hook(louder)


def forward_pre_hook(network: nn.Module) -> None:
    network[2].register_forward_pre_hook(lambda module, args: (100 * args[0],))  # type: ignore[operator, index]


def backward_hook(network: nn.Module) -> None:
    network[2].register_full_backward_pre_hook(lambda module, grads: (100 * grads[0],))  # type: ignore[operator, index]


def hook_of_a_parameter(network: nn.Module) -> None:
    network[0].weight.register_hook(lambda gradient: 100 * gradient)  # type: ignore[operator, index, union-attr]


def replaced_data(network: nn.Module) -> None:
    weight = network[2].weight  # type: ignore[index]
    weight.data = 100 * weight.data  # type: ignore[union-attr, operator]


BEFORE = [forward_hook, forward_hook_of_the_root, forward_pre_hook, backward_hook, hook_of_a_parameter]


def is_refused(moment: str, change: Any) -> None:
    released = Gradients()
    with pytest.raises((ValueError, AssertionError)):
        fit(make_plan(), At(moment, change), released, module=make_module())
    assert len(released.before_step) == 2, "the changed step was released"


@pytest.mark.parametrize("change", BEFORE, ids=lambda change: getattr(change, "__name__", None))
def test_a_hook_after_set_up_ends_the_run_before_the_release(change: Any) -> None:
    is_refused("before the forward pass", change)


def test_data_replaced_between_forward_and_release_end_the_run() -> None:
    is_refused("between forward and release", replaced_data)


class Louder(Callback):
    """Multiplies the cotangent of the loss, by a hook on a node of autograd, which shows it to nobody."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if trainer.global_step == 2:
            loss.grad_fn.register_prehook(lambda cotangents: (100 * cotangents[0],))  # type: ignore[union-attr]


@pytest.mark.parametrize("scaling", ["joint", "clip_flat", "clip_per_layer", "clip_ghost"])
def test_a_hook_on_a_node_of_autograd_ends_the_run_also_where_opacus_attaches_some(scaling: str) -> None:
    options = {"clip_norm": 1.0, "clipping": "local", "max_norm": None} if scaling.startswith("clip") else {}
    released = Gradients()
    with pytest.raises(ValueError, match="a hook was attached within a step"):
        fit(make_plan(scaling=scaling, **options), Louder(), released, module=make_module())
    assert len(released.before_step) == 2, "the changed step was released"
