"""Identity operations that change cotangents: clipping (loss_clip, cotangent_clip) and scaling by example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..bounds.identity import TrustedHook
from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Value
from ..kernels.loops import Fused
from ..kernels.rows import row_norms_by_torch, widened


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> Tensor:
        ctx.radius = radius
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return (_clipped if cotangent.is_cuda else clipped_by_torch)(cotangent, ctx.radius), None


def clipped_by_torch(cotangent: Tensor, radius: float) -> Tensor:
    """Returns the rows, each cut to norm ``radius``; a row that is not finite becomes zero."""
    size = row_norms_by_torch(cotangent, 0)
    return _weigh_rows(cotangent, radius / size.clamp_min(radius), size)


def weighed_by_torch(cotangent: Tensor, factor: Tensor) -> Tensor:
    """Returns the rows times their factors; a row whose squared norm or factor is not finite becomes zero."""
    return _weigh_rows(cotangent, factor, row_norms_by_torch(cotangent, 0).square())


def _weigh_rows(cotangent: Tensor, factor: Tensor, size: Tensor) -> Tensor:
    """Multiplies each row by its factor, with one rounding; a row whose size or factor is not finite becomes zero."""
    # infinity times 0 is NaN, and the size of a row that is not finite is NaN or infinity
    finite = (size * factor).abs() < math.inf
    shape = (-1, *(1,) * (cotangent.dim() - 1))
    # a factor in bfloat16 would add its own rounding, beyond the margin of the certificate
    weighed = widened(cotangent) * factor.reshape(shape)
    return torch.where(finite.reshape(shape), weighed, 0.0).to(cotangent.dtype)


_clipped, _weighed = Fused(clipped_by_torch), Fused(weighed_by_torch)


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
        return (_weighed if cotangent.is_cuda else weighed_by_torch)(cotangent, factor), None


def scale_cotangent(x: Tensor, factor: Tensor) -> Tensor:
    """Returns x, and multiplies example i's cotangent by factor[i]; a cotangent that is not finite becomes zero."""
    return _Scale.apply(x, factor)


@rule(CotangentClip)
def cotangent_clip(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, CotangentClip)
    return Bound(x.norm, 1.0, cotangent_cap=op.module.radius)
