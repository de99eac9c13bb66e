"""A summed loss whose cotangents at the logits are weighed by example."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..bounds.losses import CrossEntropy, Loss
from .cotangents import scale_cotangent
from .energies import read_by_loops

_FEW = 1 << 14  # logits: of more of them, torch's vector instructions gain more than one pass does


def weighed_sum(loss: Loss, logits: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    """The sum of all examples' losses; backward, example i's cotangent at the logits is multiplied by factor[i].

    A cotangent that is not finite becomes zero. Cross-entropy of a few logits on a CPU takes one pass, which makes the
    loss and the weighed cotangents; whatever else takes the loss's own way.
    """
    # a compiler would be given the loss's own way, with other last bits than the same step has without it
    return (_apart if torch.compiler.is_compiling() and logits.is_cpu else _sum)(loss, logits, target, factor)


def _sum(loss: Loss, logits: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    if _takes_one_pass(loss, logits, target, factor):
        assert isinstance(loss, CrossEntropy)
        cotangents, found = torch.empty_like(logits), array("d", (0.0, 0.0))
        temperature = array("d", (loss.temperature,))
        shape, rows = logits.shape, len(logits)
        loops().cross_entropy.at(
            1, logits.data_ptr(), *shape, target.data_ptr(), rows, factor.data_ptr(), rows, *temperature.buffer_info(),
            cotangents.data_ptr(), *shape, *found.buffer_info(),
        )  # fmt: skip
        if found[loops().STRANGE] == 0.0:
            total: Tensor = _Known.apply(logits, cotangents, found[loops().LOSS])
            return total
    return loss.per_example(scale_cotangent(logits, factor), target).sum()


_apart: Callable[..., Tensor] = torch.compiler.disable(_sum)  # type: ignore[no-untyped-call]


def _takes_one_pass(loss: Loss, logits: Tensor, target: Tensor, factor: Tensor) -> bool:
    return (
        type(loss) is CrossEntropy
        and loss.class_weights is None
        and loss.label_smoothing == 0.0
        and logits.dim() == 2
        and logits.numel() <= _FEW
        and target.dtype == torch.int64
        and target.shape == logits.shape[:1] == factor.shape
        and target.is_cpu
        and target.is_contiguous()
        and read_by_loops(logits.detach(), factor)
    )


class _Known(torch.autograd.Function):
    """A function of the logits whose value and gradient are known."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.tensor(value, dtype=logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, received: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        share = float(received)
        return gradient if share == 1.0 else gradient * share, None, None


@lru_cache(maxsize=1)
def loops() -> ModuleType:
    """Compiled when they are asked for first: not for a command that trains nothing."""
    from . import softmax_loops

    return softmax_loops
