"""Layers that torch lacks or does not bound."""

from . import functions
from .convert import make_private
from .cotangents import CotangentClip, scale_cotangent
from .dropout import KeyedDropout
from .input import BoundedInput, FrozenFeatures
from .nonlinearities import (
    Centre,
    GroupNorm,
    GroupSort,
    Householder,
    InstanceNorm,
    LayerNorm,
    MaxMin,
    Residual,
    ScaledL2Pool2d,
    TemperedSigmoid,
)
from .scaled import (
    ScaledConv1d,
    ScaledConv2d,
    ScaledConvTranspose1d,
    ScaledConvTranspose2d,
    ScaledLayer,
    ScaledLinear,
)

__all__ = [
    "BoundedInput", "Centre", "CotangentClip", "FrozenFeatures", "GroupNorm", "GroupSort", "Householder",
    "InstanceNorm", "KeyedDropout", "LayerNorm", "MaxMin", "Residual", "ScaledConv1d", "ScaledConv2d",
    "ScaledConvTranspose1d", "ScaledConvTranspose2d", "ScaledL2Pool2d",
    "ScaledLayer", "ScaledLinear", "TemperedSigmoid", "functions", "make_private",
    "scale_cotangent",
]  # fmt: skip
