"""Wraps a training function of a user's own script for the black-box tests.

The script defines

* ``network()``, which returns a new network of plain torch; * ``INPUT_SHAPE``, the shape of one example of made-up
normal numbers, or ``inputs(count, generator)``, which draws examples; * ``LOSS``, "huber" (summed over outputs,
threshold 2) or "cross_entropy" (of soft labels); * the training function, called as ``train(network, x, y, *, bound,
noise_multiplier, steps, learning_rate, optimizer, seed,
  state)``. It takes that many steps in place, each on all rows of x and y, with the mean of bounded contributions, and
  returns the optimizer's state dictionary, which it is given again as ``state``. ``seed`` chooses the noise and
  nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .black_box import Checkpoint, Data, HyperParameters, Implementation, Problem, small_regression

LOSSES = ("huber", "cross_entropy")


def script_implementation(script: str) -> Implementation:
    """Returns the implementation of ``FILE.py:FUNCTION``; ValueError names all that the script lacks."""
    path, _, function = script.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ValueError(f"--script {script} names no function of a file. HINT: use --script my_training.py:train")
    module = _loaded(Path(path))
    problems = _problems(module, path, function)
    if problems:
        raise ValueError("\n".join(problems))
    return wrapped(
        f"{Path(path).name}:{function}", getattr(module, function), module.network, _inputs(module), module.LOSS
    )


def wrapped(
    name: str,
    train: Callable[..., Mapping[str, Any] | None],
    network: Callable[[], nn.Module],
    inputs: Callable[[int, torch.Generator], Tensor],
    loss: str,
) -> Implementation:
    """Returns the implementation of a training function with the arguments that the module's text lists."""

    def build(start: Checkpoint | None) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = network()
        if start is not None:
            net.load_state_dict(dict(start.weights), strict=False)
        return net

    def run(data: Data, hyper: HyperParameters, start: Checkpoint | None) -> Checkpoint:
        net = build(start)
        carried = start is not None and bool(start.optimizer) and hyper.optimizer == "adam"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hyper.seed)
            state = train(
                net, data[0].clone(), data[1].clone(), bound=hyper.bound, noise_multiplier=hyper.noise_multiplier,
                steps=hyper.steps, learning_rate=hyper.learning_rate, optimizer=hyper.optimizer, seed=hyper.seed,
                state=copy.deepcopy(dict(start.optimizer)) if start is not None and carried else None,
            )  # fmt: skip
        return Checkpoint({n: p.detach().clone() for n, p in net.named_parameters()}, dict(state or {}))

    def predict(checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Tensor:
        net = build(checkpoint).double()
        with torch.no_grad():
            outputs: Tensor = net(x.double() if x.is_floating_point() else x)
        return outputs

    outputs = predict(_checkpoint(build(None)), inputs(1, torch.Generator().manual_seed(0)), HyperParameters(1.0))
    if outputs.dim() != 2:
        raise ValueError(
            f"{name}: the network returns a shape of {tuple(outputs.shape)}. HINT: return (rows, outputs)."
        )
    return Implementation(name, run, predict, problem=_problem(inputs, outputs.shape[1], loss))


def _checkpoint(network: nn.Module) -> Checkpoint:
    return Checkpoint({n: p.detach().clone() for n, p in network.named_parameters()})


def _problem(inputs: Callable[[int, torch.Generator], Tensor], outputs: int, loss: str) -> Problem:
    def draw(size: int, seed: int) -> Data:
        generator = torch.Generator().manual_seed(seed)
        x = inputs(size, generator)
        if loss == "huber":
            return x, 3 * torch.randn(size, outputs, generator=generator)
        return x, F.one_hot(torch.randint(outputs, (size,), generator=generator), outputs).float()

    if loss == "huber":
        return dataclasses.replace(small_regression(), draw=draw)
    return Problem(
        draw=draw,
        losses=lambda out, targets: -(targets * torch.log_softmax(out, 1)).sum(1),
        resting=lambda out: torch.softmax(out, 1),
        opposed=lambda out: F.one_hot(out.argmin(1), outputs).to(out.dtype),
    )


def _inputs(module: ModuleType) -> Callable[[int, torch.Generator], Tensor]:
    if hasattr(module, "inputs"):
        drawn: Callable[[int, torch.Generator], Tensor] = module.inputs
        return drawn
    shape = tuple(module.INPUT_SHAPE)
    return lambda count, generator: torch.randn(count, *shape, generator=generator)


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"--script: there is no file {path}. HINT: use --script my_training.py:train")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _problems(module: ModuleType, path: str, function: str) -> list[str]:
    needed = {function: "the training function", "network": "a function that returns a network"}
    found = [
        f"{path} has no {name}. HINT: {what}."
        for name, what in needed.items()
        if not callable(getattr(module, name, None))
    ]
    if not (hasattr(module, "INPUT_SHAPE") or callable(getattr(module, "inputs", None))):
        found.append(
            f"{path} has no INPUT_SHAPE. "
            "HINT: define INPUT_SHAPE = (3, 32, 32), or a function inputs(count, generator)."
        )
    if getattr(module, "LOSS", None) not in LOSSES:
        found.append(f"{path} has no LOSS. HINT: define LOSS = {' or '.join(map(repr, LOSSES))}.")
    return found
