"""Defines the feature extractor: a fixed function of one example, with an identity that tells two of them apart."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.input import frozen_problems


class FeatureExtractor(nn.Module):
    """Maps (batch, *input_shape) to (batch, *feature_shape), example by example, and is never trained.

    A subclass implements :meth:`extract`, and :meth:`settings` with every argument that decides the output. It makes
    one promise: the features of an example depend on that example alone and on nothing that was computed from private
    rows. float64 inputs give float64 features, any other dtype float32.

    Args:
        input_shape: the shape of one example.
    """

    input_shape: tuple[int, ...]
    feature_shape: tuple[int, ...]

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        self.input_shape = tuple(int(n) for n in input_shape)
        if not self.input_shape or min(self.input_shape) < 1:
            raise ValueError(
                f"input_shape={tuple(input_shape)} has no entries. "
                "HINT: give the shape of one example, such as (3, 32, 32)."
            )

    @abstractmethod
    def extract(self, x: Tensor) -> Tensor:
        """Returns the features of a batch."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns plain values that decide the output, besides the module's tensors and its input_shape."""

    def freeze(self, feature_shape: Sequence[int] | None = None) -> None:
        """Turns off gradients, enters evaluation mode and sets feature_shape; call it at the end of a subclass's
        ``__init__``.

        Args:
            feature_shape: the shape of one example's features; None finds it by running zeros through the extractor.
        """
        self.requires_grad_(False)
        for module in self.modules():
            module.training = False
        if feature_shape is None:
            with torch.no_grad():
                feature_shape = self.extract(torch.zeros(1, *self.input_shape)).shape[1:]
        self.feature_shape = tuple(feature_shape)

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(
                f"{type(self).__name__} was made for examples of shape {self.input_shape} and was given "
                f"{tuple(x.shape[1:])}. HINT: make it with input_shape={tuple(x.shape[1:])}."
            )
        self.check_frozen()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if x.shape[0] == 0:
            return x.new_zeros((0, *self.feature_shape), dtype=dtype)
        return self.extract(x.to(dtype)).to(dtype)

    def train(self, mode: bool = True) -> FeatureExtractor:
        """Keeps evaluation mode, whatever the model around it does."""
        return self

    def check_frozen(self) -> None:
        """Raises ValueError if anything in it can be trained, runs in training mode or mixes examples."""
        problems = frozen_problems(self)
        if problems:
            raise ValueError("\n".join(f"{type(self).__name__}: {reason}. HINT: {hint}." for reason, hint in problems))

    def identity(self) -> bytes:
        """Returns a digest of everything that decides the output: class, settings, shapes, and every tensor that it
        holds.

        The device and the surrounding module do not enter. Two extractors with one identity give the same features up
        to rounding, so only they may share a cache.
        """
        digest = hashlib.sha256()
        described = {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "settings": self.settings(),
            "input_shape": self.input_shape,
            "feature_shape": self.feature_shape,
        }
        _add(digest, json.dumps(described, sort_keys=True).encode())
        for name, tensor in sorted({**dict(self.named_parameters()), **dict(self.named_buffers())}.items()):
            held = tensor.detach().cpu().contiguous()
            _add(digest, f"{name} {held.dtype} {tuple(held.shape)}".encode())
            _add(digest, held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b"")
        return digest.digest()


def _add(digest: Any, part: bytes) -> None:
    """Adds each part with its length, so that two different lists of parts never give the same bytes."""
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)
