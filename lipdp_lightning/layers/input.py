"""The bound on the norm of each example, enforced on an input or on features, and the colour spaces of paper 001."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..bounds.registry import Bound, Operation, Unbounded, Value, rule
from ..kernels.loops import Fused

NORM_MARGIN = 1 + 2.0**-20  # covers the rounding of entries near the smallest float
LARGEST_ENTRY = 1e15  # larger entries, infinities included, are clamped, so that every factor is a normal float32
SMALLEST_SIZE = 1e-20  # a fraction of the bound; shorter examples are not stretched all the way to the sphere

_MATRICES = {
    "yiq": ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)),
    "yuv": ((0.299, 0.587, 0.114), (-0.14713, -0.28886, 0.436), (0.615, -0.51499, -0.10001)),
    "grayscale": ((0.299, 0.587, 0.114),),
}
COLOR_SPACES = ("rgb", "hsv", *_MATRICES)


class BoundedInput(nn.Module):
    """Brings every example into the ball of radius ``bound``, by clipping its norm or by scaling it onto the sphere.

    Guarantee: each example's output depends on that example alone and has norm at most ``bound``. NaN
    and infinities are replaced first, and zero stays zero. ``color_space`` converts RGB channels in [0, 1].
    """

    def __init__(self, bound: float = 1.0, mode: str = "clip", color_space: str = "rgb") -> None:
        super().__init__()
        problems = []
        if not (math.isfinite(bound) and bound > 0):
            problems.append(f"bound={bound} is not positive and finite. HINT: use 1.0")
        if mode not in ("clip", "normalize"):
            problems.append(f"mode={mode!r} is unknown. HINT: use 'clip' or 'normalize'")
        if color_space not in COLOR_SPACES:
            problems.append(f"color_space={color_space!r} is unknown. HINT: use one of {', '.join(COLOR_SPACES)}")
        if problems:
            raise ValueError("; ".join(problems))
        self.bound, self.mode, self.color_space = float(bound), mode, color_space

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype())
        if self.color_space != "rgb":
            x = convert_color(_sanitized(x), self.color_space)
        # rounding the factor and the product to x.dtype adds at most eps to the norm, relative to it
        radius = self.bound * (1 - torch.finfo(x.dtype).eps)
        floor = radius if self.mode == "clip" else radius * SMALLEST_SIZE
        # sanitised after a conversion, too, whose saturation may divide by the smallest float
        found: Tensor = (_bounded if x.is_cuda and not x.requires_grad else bounded_by_torch)(x, radius, floor)
        return found

    def extra_repr(self) -> str:
        return f"bound={self.bound}, mode={self.mode!r}, color_space={self.color_space!r}"


def bounded_by_torch(x: Tensor, radius: float, floor: float) -> Tensor:
    """Returns the rows in finite numbers, each times radius / max(its norm, floor)."""
    x = _sanitized(x)
    size = torch.linalg.vector_norm(x.unsqueeze(-1).flatten(1), dim=1, dtype=torch.float64)
    factor = (radius / size.clamp_min(floor)).to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1))
    # nobody else holds the sanitised values: if no gradient is needed, they are scaled in place
    return x * factor if x.requires_grad else x.mul_(factor)


_bounded = Fused(bounded_by_torch)


def _sanitized(x: Tensor) -> Tensor:
    finite = torch.nan_to_num(x, nan=0.0)
    if x.requires_grad or not x.is_cpu:  # a GPU's kernel reads and writes each entry once in any case
        return finite.clamp(-LARGEST_ENTRY, LARGEST_ENTRY)
    return finite.clamp_(-LARGEST_ENTRY, LARGEST_ENTRY)


def convert_color(x: Tensor, space: str) -> Tensor:
    """Converts RGB images (batch, 3, height, width) to another colour space; hue is a fraction of the circle."""
    if space == "rgb":
        return x
    if x.dim() != 4 or x.shape[1] != 3:
        raise ValueError(
            f"color_space={space!r} was given a tensor of shape (batch, {', '.join(map(str, x.shape[1:]))}). "
            "HINT: give it RGB images (batch, 3, height, width)."
        )
    if space == "hsv":
        return _hsv(x)
    matrix = torch.tensor(_MATRICES[space], dtype=x.dtype, device=x.device)
    return torch.einsum("oc,bchw->bohw", matrix, x)


def _hsv(x: Tensor) -> Tensor:
    value, which = x.max(1)
    spread = value - x.amin(1)
    safe = torch.where(spread > 0, spread, torch.ones_like(spread))
    red, green, blue = x.unbind(1)
    sectors = torch.stack([((green - blue) / safe) % 6, (blue - red) / safe + 2, (red - green) / safe + 4], dim=1)
    hue = sectors.gather(1, which.unsqueeze(1)).squeeze(1) / 6
    hue = torch.where(spread > 0, hue, torch.zeros_like(hue))
    saturation = torch.where(
        value > 0, spread / torch.where(value > 0, value, torch.ones_like(value)), torch.zeros_like(value)
    )
    return torch.stack([hue, saturation, value], dim=1)


@rule(BoundedInput)
def bounded_input(op: Operation, x: Value) -> Bound:
    """Bounds the output by the radius. Clipping RGB is a projection; the other forms have no Lipschitz constant."""
    assert isinstance(op.module, BoundedInput)
    projection = op.module.mode == "clip" and op.module.color_space == "rgb"
    norm = op.module.bound * NORM_MARGIN
    return Bound(min(norm, x.norm) if projection else norm, 1.0 if projection else math.inf)


# ---- a fixed feature extractor, whose output is brought into a ball

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
