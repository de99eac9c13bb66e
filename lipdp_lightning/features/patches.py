"""Computes responses to patches of two public photographs, after Coates and Ng (2011), without private rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .extractor import FeatureExtractor

_GREY = (0.299, 0.587, 0.114)
_RESPONSES = 1 << 20  # responses computed at a time (at least one image), which fit into the processor's cache
_SAMPLES = 40_000  # number of patches that the whitening is computed from
_GRID = 2.0**-14  # filters are rounded to this grid, so that every linear algebra library finds the same ones
# photographs are shrunk by these factors, since their detail is finer than that of small images
_SHRINK = (2, 3, 4, 6)


class Patches(FeatureExtractor):
    """Computes pooled responses of normalised, whitened patches to ``filters`` patches of the photographs and their
    negatives.

    Every patch of the image has its mean subtracted, is divided by its standard deviation (floored by ``contrast``) and
    whitened; z is its inner product with each filter, a whitened photograph patch of norm 1. The features are relu(z -
    threshold) and relu(-z - threshold), averaged over a pool x pool grid of cells, and their square root. Half of the
    filters are mirror images of the other half. With ``mirror`` the features are averaged over the image and its mirror
    image, which leaves half as many different features and takes no second pass.

    The photographs are the two that ship with scikit-learn.

    Args:
        input_shape: (1 or 3, height, width).
        filters: the number of filters, which is even.
        size: the side of a patch.
        shrink: cells of shrink x shrink pixels are averaged first, for patches of a coarser scale.
        pool: the number of cells along each side.
        threshold: responses below it become zero.
        contrast: added to a patch's standard deviation, in units of the photographs' full range.
        whitening: added to the eigenvalues of the patches' covariance, relative to their mean.
        mirror: whether to average over the image and its mirror image.
        low: smallest value of an input.
        high: largest value of an input.
        seed: chooses the patches that become filters.
    """

    kernels: Tensor
    offsets: Tensor
    box: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        filters: int = 512,
        size: int = 6,
        shrink: int = 1,
        pool: int = 4,
        threshold: float = 1.0,
        contrast: float = 0.04,
        whitening: float = 0.1,
        mirror: bool = False,
        low: float = 0.0,
        high: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(input_shape)
        self._settings = {
            "filters": filters, "size": size, "shrink": shrink, "pool": pool, "threshold": threshold,
            "contrast": contrast, "whitening": whitening, "mirror": mirror, "low": low, "high": high, "seed": seed,
        }  # fmt: skip
        _check(self.input_shape, self._settings)
        self.pool, self.threshold, self.contrast, self.mirror = pool, threshold, contrast, mirror
        self.low, self.high, self.shrink = low, high, shrink
        kernels, offsets = _filters(self.input_shape[0], filters, size, contrast, whitening, seed)
        self.register_buffer("kernels", kernels.clone())
        self.register_buffer("offsets", offsets.clone())
        self.register_buffer("box", torch.full((1, self.input_shape[0], size, size), 1 / kernels[0].numel()))
        self.freeze()

    def extract(self, x: Tensor) -> Tensor:
        height, width = (side // self.shrink - self.kernels.shape[-1] + 1 for side in self.input_shape[1:])
        images = max(1, _RESPONSES // (len(self.kernels) * height * width))
        pieces = (self._features(piece) for piece in ((x - self.low) / (self.high - self.low)).split(images))
        return torch.cat(list(pieces))

    def _features(self, x: Tensor) -> Tensor:
        if self.shrink > 1:
            x = F.avg_pool2d(x, self.shrink)
        box = self.box.to(x.dtype)
        mean = F.conv2d(x, box)
        deviation = (F.conv2d(x.square(), box) - mean.square()).clamp_min(0).sqrt() + self.contrast
        # the kernels have mean zero, so the mean of the patch cancels
        z = (F.conv2d(x, self.kernels.to(x.dtype)) / deviation).sub_(self.offsets.to(x.dtype))
        pooled = [F.adaptive_avg_pool2d(F.relu(side - self.threshold), self.pool) for side in (z, -z)]
        if self.mirror:
            # the response of the mirror image to a filter mirrors the response of the image to the mirrored filter
            halves = [side.chunk(2, dim=1) for side in pooled]
            pooled = [(own + other.flip(3)) / 2 for own, other in halves]
        return torch.cat(pooled, dim=1).sqrt()

    def settings(self) -> dict[str, Any]:
        return self._settings

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._settings.items())


def photographs(channels: int) -> list[Tensor]:
    """Returns the two photographs in [0, 1], (channels, height, width), each shrunk by several factors."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ValueError(
            f"Patches needs scikit-learn, which cannot be imported ({error}). HINT: pip install scikit-learn"
        ) from error
    images = []
    for picture in load_sample_images().images:
        image = torch.from_numpy(picture.copy()).permute(2, 0, 1).to(torch.float64) / 255
        if channels == 1:
            image = (image * torch.tensor(_GREY, dtype=torch.float64).view(3, 1, 1)).sum(0, keepdim=True)
        images += [F.avg_pool2d(image.unsqueeze(0), factor)[0] for factor in _SHRINK]
    return images


@lru_cache
def _filters(
    channels: int, filters: int, size: int, contrast: float, whitening: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns kernels (filters, channels, size, size) with mean zero, and the offsets to subtract from their
    responses.
    """
    generator = torch.Generator().manual_seed(seed)
    images = photographs(channels)
    patches = torch.cat([draw_patches(image, (size, size), _SAMPLES // len(images), generator) for image in images])
    patches = patches[torch.randperm(len(patches), generator=generator)]
    patches = patches - patches.mean(1, keepdim=True)
    deviations = patches.square().mean(1, keepdim=True).sqrt()
    normalised = patches / (deviations + contrast)
    mean = normalised.mean(0)
    covariance = (normalised - mean).T @ (normalised - mean) / len(normalised)
    values, vectors = torch.linalg.eigh(covariance)
    whitener = (vectors / (values.clamp_min(0) + whitening * values.mean()).sqrt()) @ vectors.T
    # flat patches are mostly noise once whitened
    chosen = (normalised[deviations[:, 0] > contrast / 2] - mean)[: filters // 2] @ whitener
    chosen = F.normalize(chosen, dim=1)
    half, subtracted = ((t / _GRID).round() * _GRID for t in (chosen @ whitener, chosen @ whitener @ mean))
    half = (half - half.mean(1, keepdim=True)).reshape(-1, channels, size, size)
    kernels, offsets = torch.cat([half, half.flip(3)]), torch.cat([subtracted, subtracted])
    return kernels.to(torch.float32), offsets.to(torch.float32).reshape(1, -1, 1, 1)


def draw_patches(image: Tensor, size: tuple[int, int], count: int, generator: torch.Generator) -> Tensor:
    """Returns patches of (height, width) at random places, as rows."""
    height, width = size
    rows = torch.randint(image.shape[1] - height + 1, (count,), generator=generator)
    columns = torch.randint(image.shape[2] - width + 1, (count,), generator=generator)
    down, right = rows[:, None] + torch.arange(height), columns[:, None] + torch.arange(width)
    taken = image[:, down[:, :, None], right[:, None, :]]
    return taken.permute(1, 0, 2, 3).flatten(1)


def _check(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    problems = []
    filters, size, pool = settings["filters"], settings["size"], settings["pool"]
    shrink = settings["shrink"]
    if len(shape) != 3 or shape[0] not in (1, 3):
        problems.append(f"input_shape={shape} is not (1 or 3, height, width). HINT: give grey or colour images")
    elif shrink < 1 or not 2 <= size <= min(shape[1:]) // shrink:
        problems.append(
            f"size={size} does not fit images of {shape[1]} x {shape[2]} shrunk by {shrink}. HINT: use size=6, shrink=1"
        )
    elif not 1 <= pool <= min(shape[1:]) // shrink - size + 1:
        problems.append(f"pool={pool} is larger than the number of places of a patch. HINT: use 4")
    if filters < 2 or filters % 2 or filters > _SAMPLES // 4:
        problems.append(f"filters={filters} is not an even number up to {_SAMPLES // 4}. HINT: use 512")
    for name in ("contrast", "whitening"):
        if not (math.isfinite(settings[name]) and settings[name] > 0):
            problems.append(f"{name}={settings[name]} is not positive. HINT: it keeps a division finite; leave it out")
    if not (math.isfinite(settings["threshold"]) and settings["threshold"] >= 0):
        problems.append(f"threshold={settings['threshold']} is negative. HINT: use 1.0")
    if not settings["low"] < settings["high"]:
        problems.append(
            f"low={settings['low']} is not below high={settings['high']}. HINT: give the range of the inputs"
        )
    if problems:
        raise ValueError("Patches: " + "; ".join(problems))
