"""Plain torch networks of layers that the certificate knows."""

from .convnet import ConvNet
from .mlp import MLP

__all__ = ["MLP", "ConvNet"]
