"""Computes pooled outer products of the responses to cosines of low frequency: local covariances of patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .extractor import FeatureExtractor


class OuterProducts(FeatureExtractor):
    """Multiplies the responses to cosines in pairs, averages the products over cells, and takes signed square roots.

    The responses are those to the products of the ``frequencies`` lowest cosines along each side, without the constant;
    channels of an image are added up with equal weights. Each cell has one feature for each pair.

    Args:
        input_shape: (channels, height, width) of one image.
        frequencies: the number of frequencies along each side.
        size: the side of the patches.
        stride: the distance between patches.
        cells: the number of cells along each side of the image.
    """

    bank: Tensor

    def __init__(
        self, input_shape: Sequence[int], frequencies: int = 4, size: int = 8, stride: int = 2, cells: int = 3
    ) -> None:
        super().__init__(input_shape)
        self._settings = {"frequencies": frequencies, "size": size, "stride": stride, "cells": cells}
        numbers = (frequencies - 1, size, stride, cells)
        if len(self.input_shape) != 3 or any(not isinstance(value, int) or value < 1 for value in numbers):
            raise ValueError(
                f"OuterProducts: input_shape={self.input_shape}, {self._settings}. "
                "HINT: give (channels, height, width), at least two frequencies, and positive whole numbers."
            )
        patterns = cosine_patterns(frequencies, size)[1:].to(torch.float32).unsqueeze(1)
        channels = self.input_shape[0]
        self.register_buffer("bank", patterns.repeat(1, channels, 1, 1) / channels)
        self.freeze()

    def extract(self, x: Tensor) -> Tensor:
        size, stride, cells = (self._settings[name] for name in ("size", "stride", "cells"))
        responses = F.conv2d(x, self.bank.to(x.dtype), stride=stride, padding=size // 2)
        first, second = torch.triu_indices(responses.shape[1], responses.shape[1], device=x.device)
        pooled = F.adaptive_avg_pool2d(responses[:, first] * responses[:, second], cells)
        return pooled.sign() * pooled.abs().sqrt()

    def settings(self) -> dict[str, Any]:
        return self._settings


def cosine_patterns(frequencies: int, size: int) -> Tensor:
    """Returns (frequencies^2, size, size): products of the orthonormal cosines of lowest frequency (DCT-II)."""
    if not 1 <= frequencies <= size:
        raise ValueError(
            f"frequencies={frequencies}: a kernel of side {size} has the frequencies 0 to {size - 1} along a side. "
            f"HINT: use a number between 1 and {size}, such as {max(1, size // 2)}."
        )
    places = (torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size
    waves = torch.stack([torch.cos(k * places) for k in range(frequencies)])
    waves = waves / torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    return torch.einsum("ih,jw->ijhw", waves, waves).reshape(-1, size, size)
