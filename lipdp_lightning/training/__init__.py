"""Training on Lightning: a module, a Strategy, and the guards in front of them."""

from .module import PrivateModule
from .strategy import PrivateStrategy

__all__ = ["PrivateModule", "PrivateStrategy"]
