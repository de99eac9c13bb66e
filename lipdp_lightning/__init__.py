"""Trains networks with differential privacy, using Lipschitz bounds instead of per-sample clipping."""

__version__ = "0.2.0"
