"""Certified forms of the loss functions that a project calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..bounds.losses import Loss, as_loss
from .recorded_step import LOSSES, LossCall

_CONTROL = ("input", "target", "size_average", "reduce", "reduction", "log_target")
# what torch's mean divides by, besides the rows, is the number of these entries in a row
_ONE_PER_TARGET = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


@dataclass(frozen=True)
class ScaledLoss(Loss):
    """A certified loss times a public positive constant, such as 1/m for a mean over m outputs."""

    loss: Loss
    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", self.loss.task)

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each example."""
        return self.factor * self.loss.per_example(logits, target)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        """Returns the Lipschitz constant of the loss times the factor."""
        return self.factor * self.loss.lipschitz(shape)


def certified_loss(call: LossCall) -> Loss:
    """Returns the certified loss of each example whose mean or sum the call has returned.

    Raises:
        ValueError: If no Lipschitz constant is known, or if the mean divides by something that the examples decide.
    """
    kind = LOSSES[call.function]
    options = {name: value for name, value in call.arguments.items() if name not in _CONTROL}
    if kind is nn.NLLLoss:
        # of log-probabilities, cross-entropy is the same function: their logsumexp is zero
        kind = nn.CrossEntropyLoss
    if kind is nn.BCELoss:
        raise ValueError(
            "binary_cross_entropy of probabilities has no Lipschitz constant in them. "
            "HINT: leave the sigmoid out of forward(), and use F.binary_cross_entropy_with_logits."
        )
    if issubclass(kind, nn.CrossEntropyLoss) and options.get("weight") is not None and _reduction(call) == "mean":
        raise ValueError(
            "cross_entropy(weight=...) with reduction 'mean' divides by the weights of the labels that are in the "
            "batch, so that each example's gradient depends on all others. "
            "HINT: use CrossEntropy(class_weights=(...)) of lipdp_lightning.bounds.losses, which divides by a constant."
        )
    loss = as_loss(kind(**_given(options), reduction="none"))
    entries = _entries(call, kind) if _reduction(call) != "sum" else 1
    return loss if entries == 1 else ScaledLoss(loss, 1 / entries)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _reduction(call: LossCall) -> str:
    return str(call.arguments.get("reduction", "mean"))


def _entries(call: LossCall, kind: type[nn.Module]) -> int:
    """Returns the number of terms in one row over which the mean is taken."""
    counted: Tensor = call.arguments["target" if issubclass(kind, _ONE_PER_TARGET) else "input"]
    return counted[:1].numel()
