"""Trains networks with differential privacy, using Lipschitz bounds instead of per-sample clipping."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_modules.declaration import Declaration as Declaration
    from .data_modules.private_data import PrivateData as PrivateData

__version__ = "0.2.0"

# imported when they are first used, since torch takes seconds
_HOME = {"Declaration": "data_modules.declaration", "PrivateData": "data_modules.private_data"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
