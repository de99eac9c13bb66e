"""Decorrelates the channels of features, as far as two public photographs show how they correlate."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .extractor import FeatureExtractor
from .patches import draw_patches, photographs

_BATCH = 16


class Whitened(FeatureExtractor):
    """Takes the principal components of another extractor's channels, scaled towards equal variance.

    Crops of the photographs that ship with scikit-learn, as large as the images, are sent through ``extractor``. Their
    mean is subtracted from an example's features (channels, height, width), and at every place the channels are
    replaced by their components along the eigenvectors of the crops' covariance, each times (eigenvalue / mean
    eigenvalue + floor) ** (-power / 2). One covariance is used for all places.

    A few directions, brightness and contrast among them, hold most of the norm of an example's features, so in features
    of norm 1 the rest is small beside the noise of private training. No private row is used.

    Args:
        extractor: an extractor with features (channels, height, width), of images with 1 or 3 channels.
        power: 0 leaves the components unscaled; with 1 and floor 0 they would all have one variance.
        floor: added to each eigenvalue, relative to their mean.
        components: the number of largest components to keep; None for all.
        crops: the number of crops of the photographs.
        low: smallest value of an input.
        high: largest value of an input.
        seed: chooses the places of the crops.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        power: float = 0.5,
        floor: float = 0.02,
        components: int | None = None,
        crops: int = 800,
        low: float = 0.0,
        high: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(extractor.input_shape)
        self._settings: dict[str, Any] = {
            "power": float(power), "floor": float(floor), "components": components, "crops": crops,
            "low": float(low), "high": float(high), "seed": seed,
        }  # fmt: skip
        _check(extractor, self._settings)
        self.extractor = extractor
        self._map: tuple[Tensor, Tensor] | None = None
        channels, *places = extractor.feature_shape
        self.freeze((channels if components is None else components, *places))

    def extract(self, x: Tensor) -> Tensor:
        mean, matrix = (part.to(x) for part in self._learned())
        features = self.extractor(x) - mean
        return torch.matmul(matrix, features.flatten(2)).reshape(-1, *self.feature_shape)

    def settings(self) -> dict[str, Any]:
        known = {"extractor": self.extractor.identity().hex(), "photographs": _digest(self.input_shape[0])}
        return {**self._settings, **known}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._settings.items())

    def _learned(self) -> tuple[Tensor, Tensor]:
        """Returns mean (channels, height, width) and matrix (components, channels) of the crops, computed at the first
        use.

        They follow from the settings and the photographs. They are not part of the identity, because their rounding
        differs between processors.
        """
        if self._map is None:
            device = next((tensor.device for tensor in self.extractor.buffers()), torch.device("cpu"))
            with torch.no_grad():
                pieces = self._crops().to(device).split(_BATCH)
                features = torch.cat([self.extractor(piece) for piece in pieces]).to("cpu", torch.float64)
            self._map = _whitening(features, self.feature_shape[0], self._settings["power"], self._settings["floor"])
        return self._map

    def _crops(self) -> Tensor:
        channels, *size = self.input_shape
        low, high, count = self._settings["low"], self._settings["high"], self._settings["crops"]
        generator = torch.Generator().manual_seed(self._settings["seed"])
        images = [image for image in photographs(channels) if image.shape[1] >= size[0] and image.shape[2] >= size[1]]
        shares = [count // len(images) + (place < count % len(images)) for place in range(len(images))]
        drawn = [draw_patches(im, (size[0], size[1]), n, generator) for im, n in zip(images, shares, strict=True)]
        return (torch.cat(drawn) * (high - low) + low).to(torch.float32).reshape(-1, *self.input_shape)


def _whitening(features: Tensor, components: int, power: float, floor: float) -> tuple[Tensor, Tensor]:
    mean = features.mean(0)
    centred = (features - mean).flatten(2).transpose(0, 1).flatten(1)
    values, vectors = torch.linalg.eigh(centred @ centred.T / centred.shape[1])
    # the sign of an eigenvector is arbitrary, so the largest entry is made positive
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    factors = (values.clamp_min(0) / values.mean().clamp_min(torch.finfo(values.dtype).tiny) + floor) ** (-power / 2)
    matrix = (vectors * largest.sign() * factors).T.flip(0)[:components]
    return mean, matrix.contiguous()


@lru_cache
def _digest(channels: int) -> str:
    digest = hashlib.sha256()
    for image in photographs(channels):
        digest.update((image * 2**20).round().to(torch.int64).numpy().tobytes())
    return digest.hexdigest()


def _check(extractor: FeatureExtractor, settings: dict[str, Any]) -> None:
    problems = []
    name, shape = type(extractor).__name__, extractor.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        problems.append(f"{name} takes rows of shape {shape}. HINT: give grey or colour images")
    elif not any(image.shape[1] >= shape[1] and image.shape[2] >= shape[2] for image in photographs(shape[0])):
        problems.append(f"images of {shape[1]} x {shape[2]} are larger than the photographs. HINT: use smaller ones")
    if len(extractor.feature_shape) != 3:
        problems.append(
            f"{name} gives {extractor.feature_shape}. HINT: give an extractor of features (channels, height, width)"
        )
    components, channels = settings["components"], extractor.feature_shape[0]
    if components is not None and not 1 <= components <= channels:
        problems.append(f"components={components} of {channels} channels. HINT: leave it out for all")
    for option, least in (("power", 0.0), ("floor", 0.0)):
        if not (math.isfinite(settings[option]) and settings[option] >= least):
            problems.append(f"{option}={settings[option]} is negative. HINT: use power=0.5, floor=0.02")
    if settings["floor"] == 0 and settings["power"] > 0:
        problems.append("floor=0 may divide by an eigenvalue of zero. HINT: use 0.02")
    if settings["crops"] < 2:
        problems.append(f"crops={settings['crops']} are too few for a covariance. HINT: use 800")
    if not settings["low"] < settings["high"]:
        problems.append(
            f"low={settings['low']} is not below high={settings['high']}. HINT: give the range of the inputs"
        )
    if problems:
        raise ValueError("Whitened: " + "; ".join(problems))
