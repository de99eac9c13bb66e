"""Rules for the operations of torch and of ``lipdp_lightning.layers``; importing this package registers them."""

from . import activations, attention, linear, pooling, refusals, structure, transposed

__all__ = ["activations", "attention", "linear", "pooling", "refusals", "structure", "transposed"]
