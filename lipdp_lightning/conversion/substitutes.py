"""The table of modules that have a certified substitute, by class or, for classes of other packages, by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..bounds.registry import module_rule
from ..layers import ScaledL2Pool2d
from .chain import evaluation
from .floored_norms import (
    ChannelScale,
    FlooredChannelNorm,
    FlooredLastNorm,
    FlooredNorm,
    RunningNorm,
    adopt,
    channel_groups,
    floored_groups,
    keep_settings,
    lets_nothing_pass,
)

Substitute = tuple[nn.Module, str, str]
"""The new module, what became of the old one, and why."""

BATCH_NORMS = ("groups", "running")


@dataclass(frozen=True)
class NormOptions:
    """The options of normalisations: ``alpha`` is the floor, ``batch_norm`` what batch normalisation becomes."""

    alpha: float = 0.1
    batch_norm: str = "groups"

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            problems.append(f"alpha={self.alpha} is not positive: without a floor there is no bound. HINT: use 0.1")
        if self.batch_norm not in BATCH_NORMS:
            problems.append(f"batch_norm={self.batch_norm!r} is unknown. HINT: use one of {', '.join(BATCH_NORMS)}")
        if problems:
            raise ValueError("; ".join(problems))


Maker = Callable[[Any, tuple[int, ...], NormOptions], Substitute | None]
_MIXES = "batch normalisation mixes examples"
_FLOOR = "a divisor without a useful floor has no bound"


def _batch_norm(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    if options.batch_norm == "running":
        if module.running_mean is None:
            return None
        return RunningNorm(module), "its running statistics became constants", _MIXES
    groups = channel_groups(shape[0])
    what = f"normalises each example over {groups} groups of channels, floor {options.alpha:g}, scale frozen"
    return floored_groups(module, shape[0], groups, options.alpha), what, _MIXES


def _group_norm(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    fresh = floored_groups(module, shape[0], module.num_groups, options.alpha)
    return fresh, f"its divisor has the floor {options.alpha:g}, scale frozen", _FLOOR


def _instance_norm(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    if module.track_running_stats:
        return None
    fresh = floored_groups(module, shape[0], shape[0], options.alpha)
    return fresh, f"its divisor has the floor {options.alpha:g}, scale frozen", _FLOOR


def _layer_norm(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    if len(module.normalized_shape) != 1:
        return None
    over_channels = len(shape) == 3 and "2d" in type(module).__name__
    norm = (FlooredChannelNorm if over_channels else FlooredLastNorm)(shape, options.alpha)
    fresh = FlooredNorm(module, norm, over_channels)
    return fresh, f"its divisor has the floor {options.alpha:g}, scale frozen", _FLOOR


def _removed(module: nn.Module, shape: tuple[int, ...], options: NormOptions) -> Substitute:
    return nn.Identity(), "removed", "its masks are keyed by the row in the batch; in evaluation it changes nothing"


def _leaky(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    slope = (module.lower + module.upper) / 2
    return nn.LeakyReLU(slope), f"LeakyReLU({slope:g}), as in evaluation", "its slopes are drawn by row in the batch"


def _l2_pool(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    size, stride = module.kernel_size, module.stride
    windows = isinstance(size, int) and stride in (None, size) and all(n % size == 0 for n in shape[1:])
    if module.norm_type != 2 or not windows:
        return None
    return ScaledL2Pool2d(size), "ScaledL2Pool2d, which computes the same", "its gradient at zero is not finite"


class Patches(nn.Module):
    """Embeds patches as timm's PatchEmbed does, without its checks of the size, which tracing cannot follow."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.proj, self.norm = original.proj, original.norm
        keep_settings(self, original)

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return after


def _patches(module: Any, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    whole = all(n % p == 0 for n, p in zip(shape[1:], module.patch_size, strict=True))
    return (Patches(module), "computes the same without checks of sizes", "the checks cannot be traced") if (
        module.flatten and whole
    ) else None  # fmt: skip


class ChannelAffine(nn.Module):
    """Computes alpha * x + beta with constants, as the Affine of timm's ResMLP does."""

    alpha: Tensor
    beta: Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        adopt(self, original)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha + self.beta


def _affine(module: nn.Module, shape: tuple[int, ...], options: NormOptions) -> Substitute:
    return ChannelAffine(module), "scale and shift frozen", "addcmul has no rule"


def _channel_scale(module: nn.Module, shape: tuple[int, ...], options: NormOptions) -> Substitute:
    return ChannelScale(module), "scale frozen", "no layer measures each example's part of its gradient"


def fold_scale(block: Any) -> bool:
    """Multiplies the scale of a ConvNeXt block of timm into the layer before it, which changes no output."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(block).__mro__}
    last = getattr(getattr(block, "mlp", None), "fc2", None)
    if "timm.models.convnext.ConvNeXtBlock" not in names or block.gamma is None or last is None:
        return False
    with torch.no_grad():
        last.weight.mul_(block.gamma.reshape(-1, *(1,) * (last.weight.dim() - 1)))
        if last.bias is not None:
            last.bias.mul_(block.gamma)
    block.gamma = None
    return True


_TABLE: dict[type | str, Maker] = {
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.Dropout1d: _removed,
    nn.Dropout2d: _removed,
    nn.Dropout3d: _removed,
    nn.AlphaDropout: _removed,
    nn.FeatureAlphaDropout: _removed,
    nn.RReLU: _leaky,
    nn.LPPool2d: _l2_pool,
    "timm.layers.drop.DropPath": _removed,
    "torchvision.ops.stochastic_depth.StochasticDepth": _removed,
    "timm.layers.patch_embed.PatchEmbed": _patches,
    "timm.layers.layer_scale.LayerScale2d": _channel_scale,
    "timm.models.mlp_mixer.Affine": _affine,
}


def substitute_of(module: nn.Module, shape: tuple[int, ...], options: NormOptions) -> Substitute | None:
    """Returns the substitute of a module that reads examples of this shape, or None if it has none or needs none.

    A subclass of a class in the table is replaced only if the substitute computes what it does, up to the floor.
    """
    if callable(module_rule(type(module))):
        return None
    for base in type(module).__mro__:
        key: type | str = base if base in _TABLE else f"{base.__module__}.{base.__qualname__}"
        if key in _TABLE:
            make = _TABLE[key]
            if base is not type(module) and not _alike(make, module, shape):
                return None
            blocked = lets_nothing_pass(module)
            made = make(module, shape, options)
            return made if made is None or not blocked else (made[0], f"{made[1]}, its zero scale set to 1", made[2])
    return None


SAME = 1e-2
"""Relative difference between a substitute and a subclass that counts as the floor and rounding."""


def _alike(make: Maker, module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Tries whether the most faithful substitute gives what the module gives in evaluation mode."""
    original: Any = copy.deepcopy(module)
    if lets_nothing_pass(original):  # a substitute's scale is one in place of zero
        with torch.no_grad():
            original.weight.fill_(1.0)
    made = make(copy.deepcopy(original), shape, NormOptions(1e-6, "running"))
    if made is None:
        return False
    like = next((t for t in original.parameters()), torch.zeros(()))
    x = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    with evaluation(original), evaluation(made[0]):
        expected, found = original(x.clone()), made[0](x.clone())
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    return bool((found - expected).norm() <= SAME * expected.norm())
