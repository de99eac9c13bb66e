"""The bound on the input's norm, enforced for each example, and the colour spaces of paper 001."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Value
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
