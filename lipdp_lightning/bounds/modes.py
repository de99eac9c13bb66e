"""Modes and tensors of a network in the course of a run, and what has changed about them, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .reachable import PLAIN

flags_of = attrgetter("requires_grad", "shape", "dtype", "__class__", "_backward_hooks", "_post_accumulate_grad_hooks")


def kept_flags(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what ``flags_of`` reads, with copies of the dicts of hooks, since torch changes these in place."""
    *flags, one, other = flags_of(tensor)
    return (*flags, *(h if h is None else dict(h) for h in (one, other)))


def alike(a: object, b: object) -> bool:
    """Returns whether two values are the same object, or equal plain values."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple) and type(a) is tuple:
        return len(a) == len(b) and all(map(alike, a, b))
    return type(a) in PLAIN and a == b


def changed_tensors(network: nn.Module, tensors: tuple[Tensor, ...], before: list[Any]) -> list[str]:
    """Returns a text for every tensor whose flags are not those of before."""
    names = {id(t): n for n, t in chain(network.named_parameters(), network.named_buffers())}
    words = []
    for tensor, old in zip(tensors, before, strict=True):
        name, now = names.get(id(tensor), "a tensor"), flags_of(tensor)
        if now[0] != old[0]:
            words.append(f"{name} was {'unfrozen' if now[0] else 'frozen'}")
        words += [f"{name} has another {what}" for what, a, b in zip(("shape", "dtype", "class"), now[1:4], old[1:4],
                                                                      strict=True) if a != b]  # fmt: skip
        if now[4:] != old[4:]:
            words.append(f"a hook was attached to {name}")
    return words


def accumulators(parameters: Iterable[Tensor]) -> list[Any]:
    """Returns the autograd nodes that add to the parameters' ``grad``.

    Python's garbage collector shows the hooks of a node, but only while no recorded graph shares it: in set-up and at
    the begin of a step, and not within a step. A node that is kept stays the one that passes use.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters]  # type: ignore[union-attr]


def modes_of_operations() -> list[str]:
    """Returns a text for every mode of torch that is active and may change what operations compute."""
    words = []
    if torch._C._len_torch_function_stack():
        modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        words += [f"{type(mode).__name__} is active, which may change every operation" for mode in modes]
    if torch._C._len_torch_dispatch_stack():
        words.append("a TorchDispatchMode is active, which may change every operation")
    return words


@contextmanager
def training_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """Puts every module into one mode for the block, and each back into its own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(mode)
        yield
    finally:
        for module, training in before:
            module.training = training


def modes_of(network: nn.Module, attributes: Iterable[dict[str, Any]]) -> list[list[bool]]:
    """Returns the modes of the modules after ``train()``, after ``eval()``, and at present."""
    read: Callable[[dict[str, Any]], bool] = itemgetter("training")
    present, found = list(map(read, attributes)), []
    for mode in (True, False):
        with training_mode(network, mode):
            found.append(list(map(read, attributes)))
    return [*found, present]


def other_modes(network: nn.Module, training: list[bool]) -> list[str]:
    """Returns a text for every module that is not in the mode in which it was certified."""
    pairs = zip(network.named_modules(), training, strict=False)
    changed = [(path or "the network", module.training) for (path, module), mode in pairs if module.training != mode]
    return [
        f"{path} is {'in training' if now else 'trained in eval'} mode, as it was not when the network was certified"
        for path, now in changed
    ]
