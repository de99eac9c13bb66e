"""Shows errors as a command does: one line for each problem, with a hint, and never a dump of the input."""

from __future__ import annotations

import re

from ..hints import with_hints_beside

LONGEST_LINE = 500
LONGEST_VALUE = 80
_GENERAL_HINT = "HINT: `lipdp {command} --help` lists the options."


def one_line(text: str) -> str:
    """Returns the text without line breaks, repeated spaces and addresses of objects."""
    return " ".join(re.sub(r"<(?:\w+\.)*(\w+) object at 0x[0-9a-f]+>", r"\1", text).split())


def shortened(text: str, longest: int = LONGEST_VALUE) -> str:
    """Returns the text, without its middle if it is longer than `longest`."""
    if len(text) <= longest:
        return text
    part = (longest - 5) // 2
    return f"{text[:part]} ... {text[-part:]}"


def described(error: BaseException) -> str:
    """Returns the message of another library's error in one line that names its kind."""
    kind = type(error).__name__
    message = shortened(one_line(str(error)), 240)
    return f"{kind}: {message}" if message else kind


def shown(command: str, error: BaseException) -> str:
    """Returns the text that a command writes to stderr for an error: one line for each problem, always with a hint."""
    known = isinstance(error, ValueError | OSError)
    text = str(error) if known else described(error)
    text = with_hints_beside(text.strip())
    if "HINT" not in text:
        text = f"{text.rstrip()} {_GENERAL_HINT.format(command=command)}"
    lines = [shortened(line.rstrip(), LONGEST_LINE) for line in text.splitlines() if line.strip()]
    return "\n".join(lines)
