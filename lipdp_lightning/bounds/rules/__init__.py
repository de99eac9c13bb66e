"""Rules for the operations of torch and of ``lipdp_lightning.layers``; importing this package registers them."""

from . import activations, linear, normalization, pooling, refusals, structure

__all__ = ["activations", "linear", "normalization", "pooling", "refusals", "structure"]
