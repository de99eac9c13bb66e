"""Rules for the operations of torch and of ``lipdp_lightning.layers``; importing this package registers them."""

from . import activations, linear, pooling, refusals, structure

__all__ = ["activations", "linear", "pooling", "refusals", "structure"]
