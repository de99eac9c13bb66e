"""Errors that are raised while rows are read, whose messages may depend on the rows and are replaced."""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from ..own_folders import is_own
from .processes import lost_process

_DATA = (Path(__file__).resolve().parents[1] / "data_modules").resolve()
_TORCH = Path(torch.__file__).resolve().parent
_COLLECTIVES = f"{_TORCH / 'distributed'}/"
_LOADERS = _TORCH / "utils" / "data"
_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def withhold(error: BaseException) -> None:
    """Replaces the message of an error, and drops the errors that caused it, unless this library has raised it.

    torch's messages hold sizes, which are those of a private sample, and indices or values that do not fit. The kind of
    the error and the line of code are kept.

    Args:
        error: The error, which is changed in place, so that nothing else can be shown later.
    """
    if not isinstance(error, Exception) or _is_refusal(error):
        return
    message = (
        f"{type(error).__name__} {_place(error.__traceback__)}; its message may hold sizes or values of private rows "
        f"and is withheld. HINT: {_hint(error)}"
    )
    error.__cause__ = error.__context__ = None
    error.__suppress_context__ = True
    error.__notes__ = []
    _empty(error)
    error.args = (message,)


@contextmanager
def withholding() -> Iterator[None]:
    """Withholds the messages of errors that are raised inside the block, where rows are read."""
    try:
        yield
    except Exception as error:
        withhold(error)
        raise


def _hint(error: Exception) -> str:
    if "OutOfMemory" in type(error).__name__ or isinstance(error, MemoryError):
        return "a smaller privacy.physical_batch_size."
    return "the same code shows the message on public or made-up rows."


def _empty(error: Exception) -> None:
    """Clears the values that some errors show and keep outside of `args`."""
    if isinstance(error, UnicodeDecodeError):
        error.object, error.start, error.end = b" ", 0, 0
    elif isinstance(error, UnicodeEncodeError):
        error.object, error.start, error.end = " ", 0, 0
    if isinstance(error, UnicodeError) and hasattr(error, "reason"):
        error.reason = "withheld"
    if isinstance(error, OSError):
        for name in ("errno", "strerror", "filename", "filename2"):
            with suppress(AttributeError):
                delattr(error, name)


def _is_refusal(error: Exception) -> bool:
    """Returns whether a message tells nothing of rows: a refusal, a file, a Trainer's option or a lost process.

    Errors of the operating system have a number; libraries that read images derive errors without one from OSError. The
    name of a file that holds a row says that the row was drawn.
    """
    of_file = isinstance(error, OSError) and error.errno is not None
    if isinstance(error, MisconfigurationException) or (of_file and not _may_read_rows(error.__traceback__)):
        return True
    last = _last(error.__traceback__)
    if last is None:
        return False
    path = Path(last.tb_frame.f_code.co_filename).resolve()
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    if str(path).startswith(_COLLECTIVES) and lost_process(error) is not None:
        return True
    # an assertion may span several lines, of which the traceback names one
    return _may_refuse(path) and (isinstance(error, AssertionError) or line.startswith("raise "))


def _may_refuse(path: Path) -> bool:
    """Returns whether messages raised in a file tell nothing of rows; those of data modules may."""
    return is_own(path) and not path.is_relative_to(_DATA)


def _may_read_rows(traceback: TracebackType | None) -> bool:
    """Returns whether a data module, a loader of torch or code of a user's own has called what failed."""
    files = []
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return any(_is_code_of_rows(Path(file).resolve()) for file in files if not file.startswith("<"))


def _is_code_of_rows(path: Path) -> bool:
    if path.is_relative_to(_DATA) or path.is_relative_to(_LOADERS):
        return True
    return not is_own(path) and not any(path.is_relative_to(folder) for folder in _INSTALLED)


def _last(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _place(traceback: TracebackType | None) -> str:
    last = _last(traceback)
    if last is None:
        return "in training"
    code = last.tb_frame.f_code
    return f"in {code.co_name}, {Path(code.co_filename).name}:{last.tb_lineno}"
