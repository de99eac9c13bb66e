"""Whether a checkpoint belongs to a model and its optimizer, and which of the two decides a hyper-parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

_SCHEDULED = ("lr", "initial_lr")


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class, and per parameter group its hyper-parameters, before any state is restored."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_fits(checkpoint: Mapping[str, Any], module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Refuse a checkpoint of another model or another optimizer before anything is loaded from it."""
    problems = []
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    different = [n for n in [*own, *(n for n in saved if n not in own)] if own.get(n) != saved.get(n)]
    if different:
        name = different[0]
        problems.append(
            f"the checkpoint is of another model: {len(different)} tensors differ, {name} is "
            f"{saved.get(name, 'absent')} there and {own.get(name, 'absent')} here"
        )
    before = checkpoint.get("lipdp_optimizers")
    if optimizer is not None and before and before[0]["class"] != type(optimizer).__name__:
        problems.append(
            f"the checkpoint holds the state of {before[0]['class']}, and {type(optimizer).__name__} is configured"
        )
    if problems:
        hint = "HINT: continue with the model and optimizer of the run's config.yaml, or use a new --run_dir."
        raise ValueError(f"{'; '.join(problems)}. {hint}")


def apply_changes(optimizer: Optimizer, was: Mapping[str, Any], now: Mapping[str, Any], scheduled: bool) -> None:
    """Give a restored optimizer the hyper-parameters that the configuration changed since the run was started.

    What was not changed continues from the checkpoint; so does a learning rate that a scheduler moves.
    """
    for group, old, new in zip(optimizer.param_groups, was["groups"], now["groups"], strict=True):
        for name, value in new.items():
            if repr(old.get(name)) != repr(value) and not (scheduled and name in _SCHEDULED):
                group[name] = value
