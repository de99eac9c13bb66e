"""Finds what a project's training step keeps for later, such as outputs in a list or the state of a metric."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any

import lightning
import torchmetrics
from torch import Tensor, nn

# hooks around training that could read what training_step has kept
_READERS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end")
_DEPTH = 3


def own_state(project: lightning.LightningModule) -> dict[str, Any]:
    """Returns the values of a project's own attributes and of its metrics, by name and in a form that compares."""
    found = {n: _value(v, _DEPTH) for n, v in vars(project).items() if not n.startswith("_")}
    for path, part in project.named_modules():
        if isinstance(part, torchmetrics.Metric):
            name = path.partition(".")[0]
            found[name] = (*found.get(name, ()), _value(vars(part), _DEPTH))
    return found


def read_in_training(project: lightning.LightningModule, kept: Collection[str]) -> list[str]:
    """Returns the problems of hooks that read what ``training_step`` keeps: it does not run on private rows.

    Args:
        project: The project.
        kept: The attributes that its ``training_step`` changes.
    """
    problems = []
    for hook in _READERS:
        function = getattr(getattr(project, hook, None), "__func__", None)
        code = getattr(function, "__code__", None)
        if code is None or function is getattr(lightning.LightningModule, hook, None):
            continue
        if read := sorted(set(kept) & set(_names(code))):
            problems.append(
                f"{type(project).__name__}.{hook} reads {', '.join(read)}, which training_step fills: it does not run "
                "on private rows, and what it computes of them is private. HINT: compute the metric in "
                "validation_step, and leave the hook out."
            )
    return problems


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _value(value: Any, depth: int) -> Any:
    """Returns a value in a form that compares; what lies deeper than that is left out."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.detach().flatten().tolist()
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)  # in which nan is equal to itself
    if isinstance(value, nn.Module) or depth == 0 or callable(value):
        return None
    if isinstance(value, Mapping):
        return [(repr(key), _value(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_value(one, depth - 1) for one in value]
    return _value(vars(value), depth - 1) if hasattr(value, "__dict__") else None
