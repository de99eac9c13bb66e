"""Identity operations that change cotangents: clipping (loss_clip, cotangent_clip) and scaling by example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..bounds.identity import TrustedHook
from ..bounds.registry import Bound, Operation, Value, rule
from ..kernels.rows import clipped, weighed


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> Tensor:
        ctx.radius = radius
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return clipped(cotangent, ctx.radius), None


class CotangentClip(nn.Module):
    """Passes its input on unchanged, and clips each example's accumulated cotangent to norm ``radius`` on the way back.

    Everything that reads the value must read this module's output. A cotangent that is not finite becomes zero.
    Clipping biases the gradient, as per-sample clipping does.

    Args:
        radius: The largest norm of one example's cotangent.

    Raises:
        ValueError: If the radius is not positive and finite.
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        if not (math.isfinite(radius) and radius > 0):
            raise ValueError(
                f"radius={radius} is not positive and finite. HINT: choose a fraction of the bound that it replaces."
            )
        self.radius = float(radius)

    def forward(self, x: Tensor) -> Tensor:
        return _Clip.apply(x, self.radius)

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class _OutputClip(TrustedHook):
    """Passes a module's output through a CotangentClip."""

    looks_only = False

    def __init__(self, clip: CotangentClip) -> None:
        super().__init__(self._clip_output)
        self.clip = clip

    def _clip_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        clipped: Tensor = self.clip(output)
        return clipped


def attach_cotangent_clips(model: nn.Module, radii: Mapping[str, float]) -> list[RemovableHandle]:
    """Clips the cotangents at the outputs of modules: whatever reads such an output reads it through the clip.

    Args:
        model: The network.
        radii: The radius of each clip, by the path of its module.

    Returns:
        The handles that remove the clips.
    """
    return [
        model.get_submodule(path).register_forward_hook(_OutputClip(CotangentClip(radius)))
        for path, radius in radii.items()
    ]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        assert factor.shape == cotangent.shape[:1], "a factor for each row"
        return weighed(cotangent, factor), None


def scale_cotangent(x: Tensor, factor: Tensor) -> Tensor:
    """Returns x, and multiplies example i's cotangent by factor[i]; a cotangent that is not finite becomes zero."""
    return _Scale.apply(x, factor)


@rule(CotangentClip)
def cotangent_clip(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, CotangentClip)
    return Bound(x.norm, 1.0, cotangent_cap=op.module.radius)
