"""Defines a transformer that classifies sequences of tokens, made of layers that the certificate knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..features import TokenEmbedding
from ..layers import FrozenFeatures, InstanceNorm, LayerNorm, Residual
from .blocks import activation


class Attention(nn.Module):
    """Softmax attention of every position to all others, with several heads; its four weights have no bias.

    Padding has the key and the value zero: it takes a share of the attention and adds nothing.

    Args:
        width: the number of features of a position.
        heads: the number of heads, which divides the width.
        scale: the factor of the logits; None takes one over the root of a head's width.
        causal: whether a position attends to none behind it.
    """

    def __init__(self, width: int, heads: int, scale: float | None = None, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width={width} does not split into {heads} heads. HINT: use a divisor of the width.")
        self.heads, self.scale, self.causal = heads, scale, causal
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, scale=self.scale)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """Returns (batch, heads, positions, features of a head)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """A frozen embedding of tokens, blocks of attention and of two dense layers, and a linear head.

    Both halves of a block see each position through a normalisation with a floored divisor (Lipschitz 1/alpha), inside
    a residual block that averages body and shortcut. The head sees the pooled positions through one, too.

    Args:
        input_shape: (length,), the number of tokens of an example, padding included.
        outputs: the number of logits.
        vocabulary: the declared number of ids; id 0 is padding.
        width: the number of features of a position.
        heads: the number of heads of attention.
        depth: the number of blocks.
        hidden: the width between the two dense layers of a block; 0 leaves this half of the blocks out.
        pooling: class reads the class token alone, mean the average over all positions.
        norm_alpha: the floor of a normalisation's divisor; 0 leaves the normalisations out.
        position_share, file, seed: as in ``features.TokenEmbedding``.
        scale: the factor of the attention's logits.
        causal: whether positions attend to those before them alone; class pooling then sees nothing.
        frozen_blocks: the number of blocks from the first on that are not trained.
        frozen_queries: whether queries and keys are not trained either.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        vocabulary: int,
        width: int = 64,
        heads: int = 4,
        depth: int = 1,
        hidden: int = 128,
        pooling: str = "mean",
        norm_alpha: float = 0.05,
        position_share: float = 0.2,
        file: str | None = None,
        seed: int = 0,
        scale: float | None = None,
        causal: bool = False,
        frozen_blocks: int = 0,
        frozen_queries: bool = False,
    ) -> None:
        super().__init__()
        if pooling not in ("class", "mean") or (causal and pooling == "class"):
            raise ValueError(f"pooling={pooling!r} with causal={causal} reads nothing. HINT: use 'mean' or 'class'.")
        if not 0 <= frozen_blocks <= depth:
            raise ValueError(f"frozen_blocks={frozen_blocks} of {depth} blocks. HINT: 0 to {depth}.")
        if len(input_shape) != 1:
            raise ValueError(f"Transformer: input_shape={tuple(input_shape)} is no row of tokens. HINT: (length,).")
        embedding = TokenEmbedding(input_shape[0], vocabulary, width, position_share, file, seed)
        self.embedding = FrozenFeatures(embedding, embedding.largest_norm, "clip")
        blocks = [
            nn.Sequential(*_block(width, heads, hidden, norm_alpha, scale, causal, frozen_queries))
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)
        for block in blocks[:frozen_blocks]:
            block.requires_grad_(False)
        self.pooling = pooling
        self.norm = LayerNorm(norm_alpha) if norm_alpha else nn.Identity()
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.blocks(self.embedding(x))
        return self.head(self.norm(positions[:, 0] if self.pooling == "class" else positions.mean(1)))


def _block(
    width: int, heads: int, hidden: int, alpha: float, scale: float | None, causal: bool, frozen_queries: bool
) -> list[nn.Module]:
    attention = Attention(width, heads, scale, causal)
    if frozen_queries:
        attention.query.requires_grad_(False)
        attention.key.requires_grad_(False)
    halves: list[list[nn.Module]] = [[attention]]
    if hidden:
        halves.append([nn.Linear(width, hidden), activation("relu"), nn.Linear(hidden, width)])
    norm = [InstanceNorm(alpha)] if alpha else []
    return [Residual(nn.Sequential(*norm, *half), None, 0.5, 0.5) for half in halves]
