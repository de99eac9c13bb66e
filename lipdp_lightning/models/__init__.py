"""Provides plain torch networks made of layers that the certificate knows."""

from .convnet import ConvNet, PublishedConvNet, ShallowVGG
from .frozen_features import FrozenNetwork, ScatteringHead, TimmHead
from .gabor_net import GaborNet
from .mixer import MLPMixer
from .mlp import MLP, Linear
from .norm_preserving import NormPreservingConvNet, NormPreservingMLP
from .transformer import Transformer
from .wide_resnet import ResNet, WideResNet

__all__ = [
    "MLP", "ConvNet", "FrozenNetwork", "GaborNet", "Linear", "MLPMixer", "NormPreservingConvNet", "NormPreservingMLP",
    "PublishedConvNet", "ResNet", "ScatteringHead", "ShallowVGG", "TimmHead", "Transformer", "WideResNet",
]  # fmt: skip
