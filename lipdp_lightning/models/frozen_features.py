"""Defines networks of fixed features and a small trained head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..features import FeatureExtractor, Scattering, TimmFeatures
from ..layers import FrozenFeatures, GroupNorm
from .convnet import ConvNet
from .mlp import MLP


class FrozenNetwork(nn.Module):
    """A frozen extractor, a projection of its features into a ball, and a trained head.

    The head is an ``MLP`` or a ``ConvNet`` of this package. To train it on features that were computed once, train that
    network by itself on them (``data_modules.Features``, with the same bound and mode as the input's) and load its
    state_dict into ``head``: both compute the same.

    Args:
        extractor: an extractor of ``lipdp_lightning.features``, or a frozen module in evaluation mode with a
            feature_shape.
        outputs: number of logits.
        bound: radius of the ball that holds the features of every example.
        mode: 'normalize' maps onto its sphere, 'clip' into it.
        hidden: widths of hidden dense layers; none for a linear head.
        widths: channels of strided convolutions before them, for features that are images.
        kernel_size: side of the kernels of these convolutions.
        activation_name: relu, tanh or maxmin.
        bias: whether the head's layers have a bias.
        zero_init: whether a dense head's last layer starts at zero.
        norm_groups: number of groups of feature channels, each normalised by itself behind the ball; 0 for none.
        norm_alpha: the floor of that normalisation's divisor.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        outputs: int,
        bound: float = 1.0,
        mode: str = "normalize",
        hidden: Sequence[int] = (),
        widths: Sequence[int] = (),
        kernel_size: int = 3,
        activation_name: str = "maxmin",
        bias: bool = True,
        zero_init: bool = False,
        norm_groups: int = 0,
        norm_alpha: float = 0.05,
    ) -> None:
        super().__init__()
        shape = extractor.feature_shape
        self.features = FrozenFeatures(extractor, bound, mode)
        self.norm = GroupNorm(norm_groups, shape[0], norm_alpha) if norm_groups else nn.Identity()
        self.head: nn.Module
        if widths:
            self.head = ConvNet(shape, outputs, widths, kernel_size, activation_name, bias=bias, hidden=hidden)
        else:
            self.head = MLP(shape, outputs, hidden, activation_name, bias, zero_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x)))


class ScatteringHead(FrozenNetwork):
    """Wavelet scattering of the image, followed by a linear, dense or shallow convolutional head.

    Args:
        input_shape: (channels, height, width) of one image.
        outputs: number of logits.
        J: number of scales; features are images smaller by 2^J.
        L: number of angles.
        log_offset: the offset of a logarithm of the coefficients. It hurts unless the mean is removed, which only
            precomputed features allow.
        bound, mode, hidden, widths, kernel_size, activation_name, bias, zero_init, norm_groups, norm_alpha: as in
            FrozenNetwork.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        J: int = 2,
        L: int = 8,
        log_offset: float | None = None,
        bound: float = 1.0,
        mode: str = "normalize",
        hidden: Sequence[int] = (),
        widths: Sequence[int] = (),
        kernel_size: int = 3,
        activation_name: str = "maxmin",
        bias: bool = True,
        zero_init: bool = False,
        norm_groups: int = 0,
        norm_alpha: float = 0.05,
    ) -> None:
        super().__init__(
            Scattering(input_shape, J, L, log_offset=log_offset), outputs, bound, mode, hidden, widths, kernel_size,
            activation_name, bias, zero_init, norm_groups, norm_alpha,
        )  # fmt: skip


class TimmHead(FrozenNetwork):
    """The pooled features of a frozen timm backbone, projected into a ball, followed by a linear or dense head.

    ``input_bound`` of the module should be the norm of the brightest image, so that images reach the backbone unscaled:
    the bound that matters is ``bound``, on the features.

    Args:
        name, pretrained, input_shape, input_range, image_size, checkpoint_path: as in TimmFeatures.
        outputs: number of logits.
        bound, mode, hidden, activation_name, bias, zero_init: as in FrozenNetwork.
    """

    def __init__(
        self,
        name: str,
        outputs: int,
        pretrained: bool = True,
        input_shape: Sequence[int] = (3, 32, 32),
        input_range: Sequence[float] = (0.0, 1.0),
        image_size: int | None = None,
        checkpoint_path: str | None = None,
        bound: float = 1.0,
        mode: str = "normalize",
        hidden: Sequence[int] = (),
        activation_name: str = "maxmin",
        bias: bool = True,
        zero_init: bool = False,
    ) -> None:
        extractor = TimmFeatures(name, pretrained, input_shape, input_range, image_size, checkpoint_path)
        super().__init__(
            extractor, outputs, bound, mode, hidden, activation_name=activation_name, bias=bias, zero_init=zero_init
        )
