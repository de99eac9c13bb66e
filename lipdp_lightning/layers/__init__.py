"""Layers that torch lacks or does not bound."""

from . import energies, floored, pairs, weighed_loss
from .activations import GroupSort, Householder, MaxMin, TemperedSigmoid
from .convert import make_private
from .cotangents import CotangentClip, scale_cotangent
from .dropout import KeyedDropout
from .frozen import FrozenFeatures
from .input import BoundedInput
from .normalization import Centre, GroupNorm, InstanceNorm, LayerNorm
from .pooling import ScaledL2Pool2d
from .residual import Residual
from .scaled import ScaledConv1d, ScaledConv2d, ScaledLayer, ScaledLinear

__all__ = [
    "BoundedInput", "Centre", "CotangentClip", "FrozenFeatures", "GroupNorm", "GroupSort", "Householder",
    "InstanceNorm", "KeyedDropout", "LayerNorm", "MaxMin", "Residual", "ScaledConv1d", "ScaledConv2d", "ScaledL2Pool2d",
    "ScaledLayer", "ScaledLinear", "TemperedSigmoid", "compile_loops", "make_private",
    "scale_cotangent",
]  # fmt: skip


def compile_loops() -> None:
    """Compile, or load, the loops of these layers now: else each is compiled when it is asked for first."""
    energies.loops(), energies.scaling_loops(), pairs.loops(), floored.loops()
    weighed_loss.loops()
