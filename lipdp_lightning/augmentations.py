"""Augments examples with randomness that belongs to the example: a function of (secret, step, example id, view)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .layers.dropout import mixed_bits

_LOW_53_BITS = (1 << 53) - 1


class Draws:
    """Random numbers for the rows of a batch.

    A row's numbers depend on its key, its id and the number of earlier draws alone, and neither on other rows nor on
    the row's place in the batch. Removing an example therefore leaves the views of all others unchanged.
    """

    def __init__(self, key: int, rows: Tensor) -> None:
        self._key, self._rows, self._count = key, rows, 0

    def bits(self, count: int) -> Tensor:
        """Returns (rows, count) integers of 64 random bits."""
        text = f"{self._key} {self._count}".encode()
        self._count += 1
        key = int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)
        return mixed_bits(key, self._rows, count)

    def uniform(self, count: int = 1) -> Tensor:
        """Returns (rows, count) float64 numbers in [0, 1)."""
        return ((self.bits(count) >> 11) & _LOW_53_BITS).to(torch.float64) * 2.0**-53

    def integers(self, low: int, high: int, count: int = 1) -> Tensor:
        """Returns (rows, count) integers from low to high, both included."""
        return low + (self.uniform(count) * (high - low + 1)).floor().to(torch.int64)


class Augmentation(nn.Module):
    """Maps (rows, *shape) to the same shape, row by row, with random numbers from ``draws`` alone."""

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement forward(x, draws)")


class HorizontalFlip(Augmentation):
    """Mirrors an image's last axis with the given probability."""

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        if not 0 <= probability <= 1:
            raise ValueError(f"probability={probability} is not in [0, 1]. HINT: 0.5.")
        self.probability = float(probability)

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        _require_images(self, x)
        chosen = draws.uniform() < self.probability
        return torch.where(chosen.reshape(-1, *(1,) * (x.dim() - 1)), x.flip(-1), x)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class ShiftedCrop(Augmentation):
    """Moves an image by up to ``padding`` pixels each way, which is a random crop of the padded image.

    Args:
        padding: the largest shift in pixels.
        mode: 'reflect' mirrors the pixels beyond the border, 'zeros' fills them with zeros.
    """

    def __init__(self, padding: int = 4, mode: str = "reflect") -> None:
        super().__init__()
        problems = []
        if not (isinstance(padding, int) and padding >= 0):
            problems.append(f"padding={padding!r} is not a number of pixels. HINT: 4")
        if mode not in ("reflect", "zeros"):
            problems.append(f"mode={mode!r} is unknown. HINT: use 'reflect' or 'zeros'")
        if problems:
            raise ValueError("; ".join(problems))
        self.padding, self.mode = padding, mode

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        _require_images(self, x)
        height, width = x.shape[-2:]
        if self.mode == "reflect" and self.padding >= min(height, width):
            raise ValueError(
                f"an image of {height} x {width} has no {self.padding} pixels to reflect. "
                f"HINT: use a padding below {min(height, width)}, or mode 'zeros'."
            )
        shift = draws.integers(-self.padding, self.padding, 2)
        down, inside_rows = self._source(height, shift[:, 0], x.device)
        right, inside_columns = self._source(width, shift[:, 1], x.device)
        # all channels of a row share one index per pixel, which a gather reads without a copy for each
        source = (down.unsqueeze(2) * width + right.unsqueeze(1)).flatten(1).unsqueeze(1)
        planes = x.reshape(len(x), -1, height * width)
        moved = planes.gather(2, source.expand_as(planes))
        if self.mode == "zeros":
            inside = (inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).flatten(1).unsqueeze(1)
            moved = torch.where(inside, moved, 0.0)
        return moved.reshape(x.shape)

    def _source(self, size: int, shift: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns for each row the pixel of an axis that moves to each place, and whether it lies inside the image."""
        last = size - 1
        source = torch.arange(size, device=device) + shift.unsqueeze(1)
        inside = (source >= 0) & (source <= last)
        reflected = last - (last - source.abs()).abs() if self.mode == "reflect" else source.clamp(0, last)
        return reflected, inside

    def extra_repr(self) -> str:
        return f"padding={self.padding}, mode={self.mode!r}"


class PerExample(Augmentation):
    """Applies any module to one row at a time, with torch's generator seeded by the example and the view.

    It is for modules that draw by the row of the batch, and costs one call per row.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        seeds = draws.bits(1).flatten().tolist()
        rows = []
        for i, seed in enumerate(seeds):
            with seeded(seed, x.device):
                rows.append(self.module(x[i : i + 1]))
        return torch.cat(rows) if rows else x


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators of the CPU and of ``device``, and restores both afterwards."""
    accelerated = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if accelerated else []):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _require_images(module: nn.Module, x: Tensor) -> None:
    if x.dim() < 3:
        raise ValueError(
            f"{type(module).__name__} was given rows of shape {tuple(x.shape[1:])}. "
            "HINT: it is for images (channels, height, width)."
        )
