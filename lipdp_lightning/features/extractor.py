"""What every feature extractor is: a fixed function of one example, with a name that tells two of them apart."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.frozen import frozen_problems


class FeatureExtractor(nn.Module):
    """Maps (batch, *input_shape) to (batch, *feature_shape), example by example, and is never trained.

    A subclass implements :meth:`extract`, and :meth:`settings` with every argument that decides the output.
    It owes one promise: the features of an example depend on that example alone and on nothing that was
    computed from private rows. float64 in gives float64 out, any other dtype float32.

    Args:
        input_shape: of one example.
    """

    input_shape: tuple[int, ...]
    feature_shape: tuple[int, ...]

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        self.input_shape = tuple(int(n) for n in input_shape)
        if not self.input_shape or min(self.input_shape) < 1:
            raise ValueError(
                f"input_shape={tuple(input_shape)} has no entries. HINT: one example's, such as (3, 32, 32)."
            )

    @abstractmethod
    def extract(self, x: Tensor) -> Tensor:
        """The features of a batch."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain values that decide the output, beside the tensors the module holds and its input_shape."""

    def freeze(self, feature_shape: Sequence[int] | None = None) -> None:
        """To be called at the end of a subclass's ``__init__``: no gradients, evaluation mode, feature_shape.

        A feature_shape of None is found by running zeros through it.
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
        """Stays in evaluation mode, whatever the model around it does."""
        return self

    def check_frozen(self) -> None:
        """ValueError unless nothing in it can be trained, runs in training mode or mixes examples."""
        problems = frozen_problems(self)
        if problems:
            raise ValueError("\n".join(f"{type(self).__name__}: {reason}. HINT: {hint}." for reason, hint in problems))

    def identity(self) -> bytes:
        """A digest of all that decides the output: class, settings, shapes, and every tensor it holds.

        Where it runs and which module it sits in do not enter. Two extractors with one identity give the
        same features up to rounding, so a cache may be shared between them and no others.
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
    """Each part with its length, so that two lists of parts never read alike."""
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)
