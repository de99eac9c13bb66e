"""Provides other methods on the same engine, and short trainings without files (docs/baselines.md).

``run_once`` trains and evaluates a configuration, ``train`` modules and data made in Python. Both use the engine, the
sampler, the noise and the accounting of ``lipdp fit``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Result as Result
    from .run import prepare as prepare
    from .run import run_once as run_once
    from .run import train as train

_HOME = dict.fromkeys(("Result", "prepare", "run_once", "train"), "run")

__all__ = ["Result", "prepare", "run_once", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lipdp_lightning.baselines' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
