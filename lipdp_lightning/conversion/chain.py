"""Finds the modules that a model calls one after the other, up to its output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, eq=False)
class Versioned:
    """A tensor as it was at one time."""

    tensor: Tensor
    version: int

    @classmethod
    def now(cls, tensor: Tensor) -> Versioned:
        return cls(tensor, tensor._version)

    def same(self, other: Versioned) -> bool:
        """Returns whether both are the same tensor with the same values."""
        return self.tensor is other.tensor and self.version == other.version


@dataclass(frozen=True)
class Call:
    """One call of a module with one tensor, which returned one tensor.

    Attributes:
        path: The module's path.
        given: The tensor that it read, and that tensor's version: a write in place makes it another value.
        returned: The tensor that it returned, likewise.
        start: The number of the call's beginning, among beginnings and ends of all calls.
        end: The number of its end.
    """

    path: str
    given: Versioned
    returned: Versioned
    start: int
    end: int


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Runs in evaluation mode and without gradients; every module's mode is as before afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            for module, _ in before:
                module.training = False
            yield
    finally:
        for module, mode in before:
            module.training = mode


def calls_of(model: nn.Module, x: Tensor) -> tuple[dict[str, Call], Tensor]:
    """Returns the calls that a forward pass makes, and its output.

    A module is left out if it is called more than once, or with anything but one tensor.
    """
    ticks = count()
    started: dict[str, tuple[int, tuple[Versioned | None, ...], bool]] = {}
    found: dict[str, Call] = {}
    seen: list[str] = []
    handles: list[RemovableHandle] = []

    def before(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = tuple(Versioned.now(a) if isinstance(a, Tensor) else None for a in args)
            started[path] = next(ticks), tensors, bool(kwargs)

        return note

    def after(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append(path)
            start, tensors, named = started[path]
            if len(tensors) == 1 and tensors[0] is not None and not named and isinstance(output, Tensor):
                found[path] = Call(path, tensors[0], Versioned.now(output), start, next(ticks))

        return note

    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
                handles.append(module.register_forward_hook(after(path), with_kwargs=True))
        with evaluation(model):
            output: Any = model(x)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{type(model).__name__} returns {type(output).__name__} and not one tensor of logits. "
            "HINT: convert the part that returns the logits."
        )
    return {path: call for path, call in found.items() if seen.count(path) == 1}, output


def last_modules(model: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Returns the paths of modules in a row, each of which reads the output of the one before; the last gives the
    model's output.

    The row is as long as possible, and a module that is itself such a row is replaced by its parts: a stage by its
    blocks, but not a residual block by its layers.
    """
    calls, output = calls_of(model, x)
    row, _ = _row(calls, "", Versioned.now(output), None, next_start=sys.maxsize)
    return tuple(row)


def _row(
    calls: dict[str, Call], inside: str, wanted: Versioned, goal: Versioned | None, next_start: int
) -> tuple[list[str], bool]:
    """Returns the row of modules inside a module that ends in a tensor, and whether it begins at the goal."""
    prefix = f"{inside}." if inside else ""
    row: list[str] = []
    while True:
        earlier = [c for p, c in calls.items() if p.startswith(prefix) and c.end < next_start]
        candidates = [c for c in earlier if c.returned.same(wanted)]
        if not candidates:
            return row, bool(row) and goal is not None and wanted.same(goal)
        last = max(candidates, key=lambda c: c.end)
        parts, whole = _row(_within(calls, last), last.path, last.returned, last.given, last.end)
        row = (parts if whole else [last.path]) + row
        wanted, next_start = last.given, last.start


def _within(calls: dict[str, Call], outer: Call) -> dict[str, Call]:
    return {p: c for p, c in calls.items() if outer.start < c.start and c.end < outer.end}
