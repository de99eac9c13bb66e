"""The Strategy of a project's own Trainer, under which callbacks are handed no training batch and no training loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..training.strategy import PrivateStrategy

# what the loops of Lightning do with a loss; the value that they find is not that of the loss
_OF_THE_LOOPS = ("__get__", "__truediv__", "div", "detach", "clone", "requires_grad_", "backward")
_LOSS_HINT = (
    "HINT: look at a metric of held-out rows; privatize(log_nonprivate=True) logs the training loss as "
    "nonprivate/loss, and the report says so."
)


class WithheldBatch:
    """Stands for a training batch in hooks, which may pass it on and no more."""

    def __repr__(self) -> str:
        return "<a training batch, withheld>"

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(
            "a training batch is private, its size too, and what a callback keeps, prints or decides by it would be "
            "released without noise. HINT: use on_before_optimizer_step, where gradients are private, or held-out rows."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    __len__ = __getitem__ = __setitem__ = __contains__ = _refuse


class _Hidden(torch.autograd.Function):
    """Replaces a loss by NaN on the way forward, and passes its gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return torch.full_like(loss, float("nan"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class WithheldLoss(torch.Tensor):
    """Stands for a training loss: its gradient is the loss's, and its value cannot be used.

    Guarantee: the value is not stored in it, so that nothing computed from it depends on a private row.
    """

    @classmethod
    def of(cls, loss: Tensor) -> WithheldLoss:
        """Returns what hooks are shown in place of a loss."""
        hidden: WithheldLoss = _Hidden.apply(loss).as_subclass(cls)
        return hidden

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<a training loss, withheld>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _OF_THE_LOOPS:
            raise ValueError(
                "a training loss is private, and what a callback prints, keeps or decides by it would be released "
                f"without noise. {_LOSS_HINT}"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class ProjectStrategy(PrivateStrategy):
    """Takes private steps, and shows callbacks and hooks neither a training batch nor its loss.

    What they find in ``parameter.grad`` is None or a release, as PrivateStrategy guarantees.
    """

    _shown: Any = None

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device; if it is for training, hooks receive what stands for it."""
        arrived = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return arrived
        self._shown = arrived
        return WithheldBatch()

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes the step on the batch that was withheld, and withholds its loss."""
        shown, self._shown = self._shown, None
        return WithheldLoss.of(super().training_step(shown, *args, **kwargs))
