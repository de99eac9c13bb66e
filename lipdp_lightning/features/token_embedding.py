"""Looks up frozen rows of a declared vocabulary: tokens of norm at most 1, with positions and a class token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .extractor import FeatureExtractor

PADDING = 0
LARGEST_VOCABULARY = 2**24  # ids travel as float32, which holds all integers up to here


class TokenEmbedding(FeatureExtractor):
    """Maps ids (batch, length) to frozen rows (batch, 1 + length, width): a class token, then one row for each token.

    A row is ``(1 - position_share) * token + position_share * position``, both of norm 1 or less, so that its norm is
    at most 1 and an example's at most ``sqrt(1 + length)``, the ``largest_norm``. Padding, which is id 0, is the row of
    zeros. Ids are rounded, and those outside of the vocabulary become the nearest one in it.

    Args:
        length: the number of ids of an example.
        vocabulary: the declared number of ids, padding included.
        width: the number of features of a row.
        position_share: the part of a row that tells its place; 0 leaves it out.
        file: rows (vocabulary, width) of a public embedding, saved by ``torch.save``; longer ones than the longest of
            norm 1 are scaled together. Without a file, rows are random directions.
        seed: decides random rows, positions and the class token.
    """

    tokens: Tensor
    places: Tensor

    def __init__(
        self, length: int, vocabulary: int, width: int = 64, position_share: float = 0.2, file: str | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__((length,))
        if not (2 <= vocabulary <= LARGEST_VOCABULARY and width >= 1 and 0 <= position_share < 1):
            raise ValueError(
                f"TokenEmbedding(vocabulary={vocabulary}, width={width}, position_share={position_share}) embeds "
                f"nothing. HINT: 2 to {LARGEST_VOCABULARY} ids with padding, a width, and a share below 1."
            )
        self._settings = {"position_share": position_share, "seed": seed}
        generator = torch.Generator().manual_seed(seed)
        tokens = _unit(torch.randn(vocabulary, width, generator=generator))
        places = _unit(torch.randn(1 + length, width, generator=generator))
        if file is not None:
            tokens = _scaled(torch.load(Path(file), weights_only=True), vocabulary, width, file)
        tokens[PADDING] = 0.0
        places[1:] *= position_share
        self.register_buffer("tokens", (1 - position_share) * tokens)
        self.register_buffer("places", places)
        self.largest_norm = (1 + length) ** 0.5
        self.freeze((1 + length, width))

    def extract(self, x: Tensor) -> Tensor:
        ids = torch.nan_to_num(x).round().clamp(0, len(self.tokens) - 1).long()
        rows = self.tokens[ids] + self.places[1:] * (ids != PADDING).unsqueeze(-1)
        first = self.places[:1].expand(len(x), 1, -1)
        return torch.cat([first, rows], dim=1).to(x.dtype)

    def settings(self) -> dict[str, Any]:
        return self._settings


def _unit(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def _scaled(rows: Any, vocabulary: int, width: int, file: str) -> Tensor:
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (vocabulary, width) or not bool(rows.isfinite().all()):
        raise ValueError(
            f"{file} does not hold finite rows of shape {(vocabulary, width)}. HINT: torch.save a float tensor with a "
            "row for each id."
        )
    longest = torch.linalg.vector_norm(rows.double(), dim=1).max().clamp_min(1e-12)
    found: Tensor = (rows.double() / longest).float()
    return found
