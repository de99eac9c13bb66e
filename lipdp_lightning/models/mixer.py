"""Defines MLP-Mixer (Tolstikhin et al. 2021), made of layers that the certificate knows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..layers import LayerNorm, Residual
from .blocks import activation, image_shape


class MLPMixer(nn.Module):
    """Turns patches into tokens; blocks mix the tokens of each channel, then the channels of each token.

    Activations have shape (batch, channels, tokens) throughout, so no block transposes: the token mixer is a linear
    layer on the last dimension, the channel mixer a convolution of kernel 1. Both see the example through a
    normalisation with a floored divisor (Lipschitz 1/alpha), inside a residual block that averages body and shortcut.

    Args:
        input_shape: (channels, height, width); the patch size divides height and width.
        outputs: number of logits.
        patch_size: side of a patch; the embedding reads every pixel once.
        width: channels of a token.
        token_width: hidden width of the token mixers.
        channel_width: hidden width of the channel mixers.
        depth: number of blocks.
        activation_name: relu, tanh or maxmin; maxmin pairs channels.
        norm_alpha: the floor of the normalisation's divisor; 0 leaves the normalisation out.
        bias: whether the layers have a bias.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        patch_size: int = 4,
        width: int = 64,
        token_width: int = 64,
        channel_width: int = 128,
        depth: int = 2,
        activation_name: str = "relu",
        norm_alpha: float = 0.5,
        bias: bool = True,
    ) -> None:
        super().__init__()
        channels, height, breadth = image_shape(input_shape, "MLPMixer")
        if patch_size < 1 or height % patch_size or breadth % patch_size:
            raise ValueError(
                f"patch_size={patch_size} does not divide images of {height} x {breadth}. HINT: use a common divisor."
            )
        tokens = (height // patch_size) * (breadth // patch_size)
        self.embedding = nn.Conv2d(channels, width, patch_size, stride=patch_size, bias=bias)
        blocks: list[nn.Module] = []
        for _ in range(depth):
            over_tokens = nn.Linear(tokens, token_width, bias=bias), nn.Linear(token_width, tokens, bias=bias)
            blocks.append(_mixer(*over_tokens, activation_name, norm_alpha))
            over_channels = (
                nn.Conv1d(width, channel_width, 1, bias=bias),
                nn.Conv1d(channel_width, width, 1, bias=bias),
            )
            blocks.append(_mixer(*over_channels, activation_name, norm_alpha))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding(x).flatten(2)
        return self.head(self.blocks(tokens).mean(2))


def _mixer(first: nn.Module, second: nn.Module, activation_name: str, norm_alpha: float) -> nn.Module:
    norm = [LayerNorm(norm_alpha)] if norm_alpha else []
    return Residual(nn.Sequential(*norm, first, activation(activation_name), second), None, 0.5, 0.5)
