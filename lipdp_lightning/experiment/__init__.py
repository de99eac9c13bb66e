"""Makes experiments from configurations, and runs short trainings that write no file (docs/baselines.md).

``run_once`` trains and evaluates a configuration; ``train`` takes modules and data made in Python. Both use the engine,
the sampler, the noise and the accounting of ``lipdp fit``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .short_training import Result as Result
    from .short_training import prepare as prepare
    from .short_training import run_once as run_once
    from .short_training import train as train

_HOME = dict.fromkeys(("Result", "prepare", "run_once", "train"), "short_training")

__all__ = ["Result", "prepare", "run_once", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lipdp_lightning.experiment' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
