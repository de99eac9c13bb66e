"""Trains networks with differential privacy, using Lipschitz bounds instead of per-sample clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adoption.engine import Engine as Engine
    from .adoption.privatize import privatize as privatize

__version__ = "0.2.0"
__all__ = ["Engine", "privatize"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that importing the package costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lipdp_lightning.adoption.{name.lower()}"), name)
