"""Plain torch networks of layers that the certificate knows."""

from .convnet import ConvNet
from .mlp import MLP
from .wide_resnet import WideResNet

__all__ = ["MLP", "ConvNet", "WideResNet"]
