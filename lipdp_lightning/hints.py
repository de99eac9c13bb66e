"""Puts the hint of an error on the line of its problem."""

from __future__ import annotations

import re


def with_hints_beside(text: str) -> str:
    """Returns the text of an error in which every hint is on the line of its problem."""
    return re.sub(r"\.?\s*\n\s*HINT:", ". HINT:", text)
