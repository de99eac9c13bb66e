"""Computes Gabor filters with fixed parameters: oriented edges, pooled and normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .extractor import FeatureExtractor

_SMALLEST_DEVIATION = 1e-3


class Gabor(FeatureExtractor):
    """Computes |image * filter| for a bank of Gabor filters, pools by averages, and normalises each group of channels.

    The bank has ``orientations`` directions, each as cosine and sine, at the wavelength size / 2 and, where ``filters``
    is larger, at repeatedly halved wavelengths. Normalisation subtracts the mean over a group of channels and all
    places of one example and divides by the standard deviation, floored at 0.001.

    Args:
        input_shape: (channels, height, width); channels are added up with equal weights.
        filters: the number of filters, a multiple of twice the orientations.
        size: the side of a filter.
        stride: the distance between places.
        pool: cells of pool x pool places are averaged.
        groups: the number of channel groups; each is normalised by itself.
        orientations: the number of directions, evenly spaced over the half circle.
    """

    bank: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        filters: int = 16,
        size: int = 8,
        stride: int = 2,
        pool: int = 2,
        groups: int = 16,
        orientations: int = 8,
    ) -> None:
        super().__init__(input_shape)
        self._settings = {
            "filters": filters, "size": size, "stride": stride, "pool": pool, "groups": groups,
            "orientations": orientations,
        }  # fmt: skip
        _check(self.input_shape, self._settings)
        self.stride, self.pool, self.groups = stride, pool, groups
        bank = gabor_bank(filters, size, orientations)
        self.register_buffer("bank", bank.unsqueeze(1).repeat(1, self.input_shape[0], 1, 1) / self.input_shape[0])
        self.freeze()

    def extract(self, x: Tensor) -> Tensor:
        half = self.bank.shape[-1] // 2
        responses = F.conv2d(x, self.bank.to(x.dtype), stride=self.stride, padding=half).abs()
        pooled = F.avg_pool2d(responses, self.pool)
        flat = pooled.reshape(len(x), self.groups, -1)
        deviation = flat.std(2, keepdim=True, unbiased=False).clamp_min(_SMALLEST_DEVIATION)
        return ((flat - flat.mean(2, keepdim=True)) / deviation).reshape(pooled.shape)

    def settings(self) -> dict[str, Any]:
        return self._settings

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._settings.items())


def gabor_bank(filters: int, size: int, orientations: int) -> Tensor:
    """Returns (filters, size, size): a cosine and a sine for each direction and wavelength, of mean 0 and norm 1."""
    axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    envelope = torch.exp(-(rows**2 + columns**2) / (2 * (size / 4) ** 2))
    bank = []
    for index in range(filters // 2):
        angle = math.pi * (index % orientations) / orientations
        wavelength = size / 2 ** (1 + index // orientations)
        phase = 2 * math.pi * (columns * math.cos(angle) + rows * math.sin(angle)) / wavelength
        for wave in (torch.cos(phase), torch.sin(phase)):
            carrier = wave - (wave * envelope).sum() / envelope.sum()
            bank.append(carrier * envelope)
    stacked = torch.stack(bank)
    return (stacked / stacked.flatten(1).norm(dim=1).view(-1, 1, 1)).to(torch.float32)


def _check(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    problems = []
    filters, orientations, size = settings["filters"], settings["orientations"], settings["size"]
    if len(shape) != 3:
        problems.append(f"input_shape={shape} is not (channels, height, width). HINT: it takes images only")
    if any(not isinstance(value, int) or value < 1 for value in settings.values()):
        problems.append(
            f"{settings}: every option must be a positive whole number. HINT: leave them out for the defaults"
        )
    else:
        if filters % (2 * orientations):
            problems.append(f"filters={filters} is not a multiple of 2 x {orientations} orientations. HINT: use 16")
        if filters % settings["groups"]:
            problems.append(f"{filters} filters cannot be cut into {settings['groups']} groups. HINT: use groups=16")
        if size < 3 * 2 ** (1 + (filters // 2 - 1) // orientations):
            problems.append(
                f"size={size} is too small for {filters} filters: a wave needs three places. HINT: use size=8"
            )
    if problems:
        raise ValueError("Gabor: " + "; ".join(problems))
