"""Changes in mid-run that reach a step from around it: the graph of the loss, the precision, the Strategy, the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Gradients, fit, make_plan
from torch import Tensor, nn


class At(Callback):
    """Does something in one of Lightning's hooks, at the second step."""

    def __init__(self, hook: str, action: Callable[..., Any]) -> None:
        setattr(self, hook, lambda trainer, module, *args: trainer.global_step == 1 and action(trainer, module, *args))


def _nodes(loss: Tensor) -> list[Any]:
    found, todo = [], [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.append(node)
            todo += [one for one, _ in node.next_functions]
    return found


def _hook_on_a_node(trainer: Any, module: Any, loss: Tensor) -> None:
    _nodes(loss)[0].register_prehook(lambda gradients: tuple(100 * g for g in gradients))


def _hooks_on_all_nodes(trainer: Any, module: Any, loss: Tensor) -> None:
    for node in _nodes(loss)[1:]:
        node.register_hook(lambda given, _: tuple(None if g is None else 100 * g for g in given))


def _hook_on_an_accumulator(trainer: Any, module: Any, loss: Tensor) -> None:
    weight = module.network[0].weight
    weight.view_as(weight).grad_fn.next_functions[0][0].register_prehook(lambda g: (100 * g[0],))


def _hook_for_several(trainer: Any, module: Any, loss: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), lambda g: [one.mul_(9) for one in g])


def _saved_tensors(trainer: Any, module: Any, loss: Tensor) -> None:
    for node in _nodes(loss):
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for value in (*saved, *getattr(node, "saved_tensors", ())):
            if isinstance(value, Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter):
                value.data.mul_(100)


def _own_precision(trainer: Any, module: Any, *_: Any) -> None:
    plugin = trainer.strategy.precision_plugin
    original = plugin.backward
    plugin.backward = lambda tensor, *args, **kwargs: original(100 * tensor, *args, **kwargs)


def _redirected(trainer: Any, module: Any, *_: Any) -> None:
    class Louder(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 100 * module.training_step(*args, **kwargs)

    trainer.strategy.model = Louder()
    trainer.strategy._forward_redirection = lambda wrapper, original, name, *args, **kwargs: wrapper(*args, **kwargs)


def _weaker_plan(trainer: Any, module: Any, *_: Any) -> None:
    object.__setattr__(trainer.strategy.plan, "noise_multiplier", 0.01)


def _of(path: str, value: Any) -> Callable[..., None]:
    def change(trainer: Any, module: Any, *_: Any) -> None:
        thing, *names = trainer, *path.split(".")
        for name in names[:-1]:
            thing = getattr(thing, name)
        setattr(thing, names[-1], value(getattr(thing, names[-1])) if callable(value) else value)

    return change


START, BACKWARD = "on_train_batch_start", "on_before_backward"
CHANGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "hook on a node of the loss": (BACKWARD, _hook_on_a_node),
    "hooks on all nodes": (BACKWARD, _hooks_on_all_nodes),
    "hook on an accumulator within the step": (BACKWARD, _hook_on_an_accumulator),
    "hook for several gradients within the step": (BACKWARD, _hook_for_several),
    "values saved for the backward pass": (BACKWARD, _saved_tensors),
    "backward of the precision": (START, _own_precision),
    "backward of the precision, late": (BACKWARD, _own_precision),
    "model of the Strategy": (START, _redirected),
    "noise of the plan": (START, _weaker_plan),
    "noise of the plan, late": (BACKWARD, _weaker_plan),
    "backward of the module, late": (BACKWARD, lambda t, m, loss: setattr(m, "backward", lambda g: (9 * g).backward())),
    "release of the Strategy, late": (BACKWARD, lambda t, m, loss: setattr(t.strategy, "_release", lambda: None)),
    "release of the mechanism, late": (BACKWARD, _of("strategy.mechanism.privatize_", lambda _: lambda *a: None)),
    "rows per example": (START, _of("strategy.mechanism.views", 100)),
    "plan of the mechanism": (START, _of("strategy.mechanism.plan", lambda plan: make_plan(noise_multiplier=0.01))),
    "network of the mechanism": (START, _of("strategy.mechanism.model", lambda network: nn.Linear(6, 3))),
    "run of the mechanism": (START, _of("strategy.mechanism.run", lambda run: lambda x: 100 * run(x))),
    "release of the mechanism": (START, _of("strategy.mechanism.privatize_", lambda _: lambda *a, **k: None)),
    "certificate": (BACKWARD, _of("strategy.mechanism.certificate", lambda certificate: None)),
    "scaling": (START, _of("strategy.mechanism.scaling.numbers", lambda _: lambda *a: None)),
    "number of micro-batches": (START, _of("strategy.physical_batch_size", 5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def untouched() -> list[Tensor | None]:
    seen = Gradients()
    fit(make_plan(steps=3), seen)
    return seen.before_step


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was(name: str, untouched: Any) -> None:
    seen = Gradients()
    try:
        fit(make_plan(steps=3), At(*CHANGES[name]), seen)
    except Exception:  # private attributes that were replaced may fail in any way, before the release
        assert len(seen.before_step) == 1
    else:
        assert all(torch.equal(a, b) for a, b in zip(seen.before_step, untouched, strict=True))
