"""Tests whether an example's output depends on the other examples of its batch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..layers.dropout import KeyedDropout

_NOISE = 1e-8


def interaction(model: nn.Module, inputs: Tensor) -> float:
    """Returns the largest influence of a batch on one of its examples; it is zero up to rounding if there is none.

    Every certificate is a statement about one example. A rule that hides a mean over the batch makes all of them
    worthless, and single examples never reveal it. The outputs of a batch are compared with those of its examples one
    by one, and the gradients of one example's output with respect to the other inputs are compared with zero.
    """
    net = copy.deepcopy(model)
    batch = inputs.detach().clone().requires_grad_()
    together = _outputs(net, batch)
    alone = torch.cat([_outputs(net, x).detach() for x in inputs.split(1)])
    difference = float((together.detach() - alone).norm() / alone.norm().clamp_min(1.0))
    first = len(inputs) // 2
    (pulled,) = torch.autograd.grad(together[first].sum(), batch, allow_unused=True, materialize_grads=True)
    others = torch.cat((pulled[:first], pulled[first + 1 :]))
    return (difference if difference > _NOISE else 0.0) + float(others.norm())


def _outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    for module in net.modules():
        if isinstance(module, KeyedDropout) and module.context is not None:
            module.context = (module.context[0], torch.zeros(len(inputs), dtype=torch.int64))
    result: Tensor = net(inputs)
    return result
