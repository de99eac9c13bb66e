"""Writes text that may hold names from files, columns and configurations to the terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from .formats import clean_lines

__all__ = ["show"]


def show(text: object, stream: TextIO | None = None) -> None:
    """Writes text to standard output, or another stream, without the control characters that a name may hold.

    Line breaks stay. Terminal escapes, marks that change the writing direction, and bytes of a file name that are not
    text become spaces.
    """
    target = sys.stdout if stream is None else stream
    target.write(clean_lines(text))
    target.flush()
