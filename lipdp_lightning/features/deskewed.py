"""Makes handwriting upright: an image is sheared by its own moments before its features are taken."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .extractor import FeatureExtractor

_SMALLEST_MASS = 1e-6


class Deskewed(FeatureExtractor):
    """Takes the features of each image after a shear that makes its second moments upright, and a shift to its centre.

    With grey values as masses, covariances of rows and columns about the centre of mass give the slant cov(row, column)
    / var(row), clamped to ``largest_slant``; rows are moved against it. Channels share the moments of their mean. An
    image is changed by its own pixels alone. The strokes should be light on a dark background.

    Args:
        extractor: the extractor that is applied to the upright image.
        largest_slant: the largest slant in columns per row; 1 is 45 degrees.
    """

    def __init__(self, extractor: FeatureExtractor, largest_slant: float = 1.0) -> None:
        super().__init__(extractor.input_shape)
        problems = []
        if len(extractor.input_shape) != 3:
            problems.append(
                f"{type(extractor).__name__} does not take (channels, height, width). HINT: it takes images only"
            )
        if not (math.isfinite(largest_slant) and largest_slant > 0):
            problems.append(f"largest_slant={largest_slant} is not positive. HINT: use 1.0")
        if problems:
            raise ValueError("Deskewed: " + "; ".join(problems))
        self.extractor, self.largest_slant = extractor, float(largest_slant)
        self.freeze(extractor.feature_shape)

    def extract(self, x: Tensor) -> Tensor:
        upright: Tensor = self.extractor(deskew(x, self.largest_slant))
        return upright

    def settings(self) -> dict[str, Any]:
        return {"largest_slant": self.largest_slant, "extractor": self.extractor.identity().hex()}

    def extra_repr(self) -> str:
        return f"largest_slant={self.largest_slant}"


def deskew(x: Tensor, largest_slant: float = 1.0) -> Tensor:
    """Returns images (batch, channels, height, width) upright and centred, by bilinear interpolation with black
    outside.
    """
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=x.dtype, device=x.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=x.dtype, device=x.device) - (width - 1) / 2
    grey = x.mean(1).clamp_min(0)
    grey = grey / grey.sum((1, 2), keepdim=True).clamp_min(_SMALLEST_MASS)
    row = (grey.sum(2) * rows).sum(1)
    column = (grey.sum(1) * columns).sum(1)
    from_row = rows[None, :, None] - row[:, None, None]
    from_column = columns[None, None, :] - column[:, None, None]
    variance = (grey * from_row.square()).sum((1, 2)).clamp_min(_SMALLEST_MASS)
    slant = ((grey * from_row * from_column).sum((1, 2)) / variance).clamp(-largest_slant, largest_slant)
    # the place that each pixel of the result is read from, in halves of the image's size
    placement = x.new_zeros(len(x), 2, 3)
    placement[:, 0, 0] = placement[:, 1, 1] = 1
    placement[:, 0, 1] = slant * height / width
    placement[:, 0, 2] = column * 2 / width
    placement[:, 1, 2] = row * 2 / height
    return F.grid_sample(x, F.affine_grid(placement, list(x.shape), align_corners=False), align_corners=False)
