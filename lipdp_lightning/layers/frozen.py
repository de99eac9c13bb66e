"""A fixed feature extractor inside a network, its output brought into a ball."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Unbounded, Value
from .input import NORM_MARGIN, BoundedInput

SAME = 1e-3
"""Relative difference of one example's features in two batches that counts as rounding."""


class FrozenFeatures(nn.Module):
    """Runs ``extractor`` in evaluation mode and brings each example's features into the ball of ``bound``.

    Neither the extractor nor anything before it is trained, so no gradient passes through it and its Lipschitz constant
    is not needed. The layers after it rely on ``||output|| <= bound`` alone, which holds whatever the extractor
    returns. The extractor must treat every example by itself; batch normalisation in training mode, for instance, does
    not. Dropout inside it is removed, which changes nothing in evaluation mode.

    Args:
        extractor: A ``lipdp_lightning.features`` extractor, or any module that is frozen and in evaluation mode.
        bound: The radius of the ball.
        mode: 'normalize' scales each example's features onto the sphere, 'clip' shortens those beyond it.
    """

    set_in_steps = ("_tried",)

    def __init__(self, extractor: nn.Module, bound: float = 1.0, mode: str = "normalize") -> None:
        super().__init__()
        problems = frozen_problems(extractor)
        if problems:
            raise ValueError("\n".join(f"FrozenFeatures: {reason}. HINT: {hint}." for reason, hint in problems))
        without_dropout(extractor)
        self.extractor, self.ball = extractor, BoundedInput(bound, mode)
        self._tried: set[tuple[int, ...]] = set()
        for module in self.modules():
            module.training = False

    @property
    def bound(self) -> float:
        return self.ball.bound

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.ball(self.extractor(x))
        return features

    def train(self, mode: bool = True) -> FrozenFeatures:
        """Stays in evaluation mode, whatever the model around it does."""
        return self


@rule(FrozenFeatures)
def frozen_features(op: Operation, x: Value) -> Bound:
    """Bounds the output by the ball's radius; the Lipschitz constant is infinite, so nothing before may be trained."""
    module = op.module
    assert isinstance(module, FrozenFeatures)
    problems = frozen_problems(module)
    if not problems and x.shape not in module._tried:
        problems = _dependence(module.extractor, x.shape)
        if not problems:
            module._tried.add(x.shape)
    if problems:
        raise Unbounded("; ".join(reason for reason, _ in problems), "; ".join(hint for _, hint in problems))
    return Bound(module.bound * NORM_MARGIN, math.inf)


def frozen_problems(module: nn.Module) -> list[tuple[str, str]]:
    """Returns (reason, hint) for everything that keeps a module from being a fixed function of one example."""
    problems = []
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    if trained:
        reason = f"parameters of the frozen part are trained ({_listed(trained)})"
        problems.append((reason, "freeze it with .requires_grad_(False)"))
    for path, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            reason = f"{path or type(part).__name__} is a batch normalisation without running statistics"
            problems.append((f"{reason}, which mixes examples", "use a backbone that keeps running statistics"))
    training = [path or type(part).__name__ for path, part in module.named_modules() if part.training]
    if training:
        reason = f"the frozen part is in training mode ({_listed(training)}), where statistics change and examples mix"
        problems.append((reason, "call .eval() on it"))
    return problems


def without_dropout(module: nn.Module) -> None:
    """Replaces torch's dropout layers, which are identities in evaluation mode, by nn.Identity."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, _DropoutNd):
                setattr(parent, name, nn.Identity())


def _dependence(extractor: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Tries random batches: an example's features must not change with its neighbours, its place or the call.

    This cannot prove that examples are kept apart. It finds extractors that mix them by more than SAME, that draw
    random numbers, or whose buffers a call changes.
    """
    generator = torch.Generator().manual_seed(0)
    like = next((t for t in (*extractor.parameters(), *extractor.buffers()) if t.is_floating_point()), torch.zeros(()))
    first, *others = (torch.rand((1, *shape), generator=generator).to(like) for _ in range(5))
    buffers = [(b, b._version) for b in extractor.buffers()]
    with torch.no_grad():
        alone = _rows(extractor(first))
        between = _rows(extractor(torch.cat([others[0], first, others[1]])))
        beside = _rows(extractor(torch.cat([first, others[2], others[3]])))
    problems = []
    if any(_differ(alone[0], row) for row in (between[1], beside[0])):
        reason = "the features of one example change with the other examples of the batch, or from call to call"
        problems.append((reason, "use an extractor that treats every example by itself, without random draws"))
    now = [(b, b._version) for b in extractor.buffers()]
    if len(now) != len(buffers) or any(a is not b or v != w for (a, v), (b, w) in zip(buffers, now, strict=True)):
        problems.append(("a call changes its buffers", "keep no statistics in the extractor"))
    return problems


def _rows(features: Any) -> torch.Tensor:
    if not isinstance(features, Tensor) or features.dim() < 2:
        raise Unbounded("the extractor does not return one tensor (batch, ...)", "return features for every example")
    return features.flatten(1)


def _differ(a: Tensor, b: Tensor) -> bool:
    scale = torch.linalg.vector_norm(torch.nan_to_num(a.double())).clamp_min(1e-6)
    difference = torch.nan_to_num(a.double() - b.double())
    return a.shape != b.shape or bool(torch.linalg.vector_norm(difference) > SAME * scale)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
