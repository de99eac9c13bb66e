"""Hides advice of the libraries beneath a command that says nothing about this run."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from ..report.show import show

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_fabric", "torch.distributed")
_MESSAGES = (
    ".*srun.*",
    ".*does not have many workers.*",
    ".*LightningCLI's args parameter.*",
    ".*configure_optimizers` will be overridden.*",
    ".*LeafSpec.*",
    ".*smaller than the logging interval.*",
    ".*your dataloader is not resumable.*",
    ".*setting `num_workers`.*",
    ".*has `shuffle=.*",
    ".*GPU available but not used.*",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Shows warnings as one line on stderr, and hides deprecations and guesses of the libraries."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    for logger, _ in before:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            for message in _MESSAGES:
                warnings.filterwarnings("ignore", message=message)
            _ignore_guesses()
            warnings.showwarning = _one_line
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _ignore_guesses() -> None:
    from lightning.fabric.utilities.warnings import PossibleUserWarning

    warnings.simplefilter("ignore", PossibleUserWarning)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> Any:  # fmt: skip
    show(f"warning: {' '.join(str(message).split())}\n", sys.stderr)
