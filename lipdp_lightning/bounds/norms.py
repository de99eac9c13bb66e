"""Certified norms of weights: dense, convolutions and their geometry, and between exact evaluations."""

from lipdp_lightning.bounds.conv_norms import (
    conv_norm,
    conv_norm_exact,
    conv_norm_fast,
    conv_norm_size_free,
    conv_norm_tight,
)
from lipdp_lightning.bounds.geometry import coverage, kappa, output_size
from lipdp_lightning.bounds.gram import dense_norm, gram_norm
from lipdp_lightning.bounds.tracker import NormEntry, NormTracker

__all__ = [
    "NormEntry",
    "NormTracker",
    "conv_norm",
    "conv_norm_exact",
    "conv_norm_fast",
    "conv_norm_size_free",
    "conv_norm_tight",
    "coverage",
    "dense_norm",
    "gram_norm",
    "kappa",
    "output_size",
]
