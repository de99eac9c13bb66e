"""Names the folders that hold this project's code, in a checkout as in an installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent

# in a checkout the two folders below the library are links to folders beside it
OWN_FOLDERS = (_LIBRARY, *((_LIBRARY / name).resolve() for name in ("callbacks", "data_modules")))
"""The folders of the library, its callbacks and its data modules, with links resolved."""


def is_own(file: str | Path) -> bool:
    """Returns whether a file belongs to this project's code."""
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in OWN_FOLDERS)


@contextmanager
def importable_folder() -> Iterator[None]:
    """Lets a configuration name modules of the current folder, such as ``my_data.Mine`` of ``my_data.py``.

    The folder comes last on the path, so that no file in it takes the place of an installed package.
    """
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added:
            sys.path.remove(folder)
