"""What Lightning and torch do at every step and a training has no use for: left out, where nobody asked for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Unprofiled(PassThroughProfiler):
    """The profiler that measures nothing, without a generator for each of some fifty sections of a step."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return _NOTHING


def spare_profiling(trainer: Any) -> None:
    """Where the user asked for no profiler, sections of a step cost nothing."""
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = Unprofiled()


def arrival_of(trainer: Any, device: torch.device) -> Callable[[Any, int], Any] | None:
    """What is left of a batch's transfer to a CPU, where it is already; None where Lightning is to be asked each time.

    Lightning looks up at every step whether the module or the data module has hooks of its own, and takes the batch
    apart to move tensors to where they are. Here, that is done once: of hooks, only the data module's for a batch that
    has arrived is left.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    hooks = "transfer_batch_to_device", "on_after_batch_transfer"
    own = any(is_overridden(name, module) for name in hooks) or is_overridden(hooks[0], data)
    if own or data is None or device.type != "cpu" or type(trainer.profiler) is not Unprofiled:
        return None
    arrived: Callable[[Any, int], Any] = data.on_after_batch_transfer
    return arrived


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``zero_grad`` without the records of torch's own profiler, which take longer than the rest of it."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
