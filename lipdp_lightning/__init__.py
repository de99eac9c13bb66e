"""Trains networks with differential privacy, using Lipschitz bounds instead of per-sample clipping."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipdp_lightning.release import load_release as load_release

__version__ = "0.2.0"

# what the package offers at its top, each imported when it is first asked for, since torch takes seconds
_OFFERED = {"load_release": "lipdp_lightning.release"}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OFFERED[name]), name)
