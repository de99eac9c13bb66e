"""Packages that are left out of an installation unless an extra names them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRAS = {"jax": "jax", "matplotlib": "plots", "optuna": "tune", "pyarrow": "parquet", "wandb": "wandb"}


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def require(package: str, purpose: str) -> None:
    """Raises ValueError if a package is missing, and names the extra that installs it.

    Args:
        package: A package that an extra installs.
        purpose: What needs it, as the beginning of a sentence.
    """
    if not is_installed(package):
        raise ValueError(
            f"{purpose} needs {package}, which is not installed. HINT: pip install 'lipdp-lightning[{EXTRAS[package]}]'"
        )


def imported(name: str, purpose: str) -> Any:
    """Returns a module of a package that an extra installs; raises ValueError if the package is missing.

    Args:
        name: The module, such as ``pyarrow.parquet``.
        purpose: What needs it, as the beginning of a sentence.
    """
    require(name.partition(".")[0], purpose)
    return import_module(name)
