"""Integrates gradient flow of small networks under clipping and under this library's scalings (paper 003, section 4).

It studies made-up or public rows: nothing here is private, and no training uses it.
"""

from __future__ import annotations

from .example_factors import Clipped, Factors, Scaled, Unclipped
from .flow import Flow, integrate
from .kernel import Spectrum, jacobians, layer_kernels, layers_of, spectrum, weighted_kernel

__all__ = [
    "Clipped",
    "Factors",
    "Flow",
    "Scaled",
    "Spectrum",
    "Unclipped",
    "integrate",
    "jacobians",
    "layer_kernels",
    "layers_of",
    "spectrum",
    "weighted_kernel",
]
