"""Shows errors as a command does: one line for each problem, with a hint, and never a dump of the input."""

from __future__ import annotations

import re

from ..hints import with_hints_beside

LONGEST_LINE = 500
LONGEST_VALUE = 80
_HEADING = re.compile(r" \d+ problem(\(s\))?:$")
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
    """Returns the text that a command writes to stderr for an error: one line for each problem, always with a hint.

    A line that ends before its hint belongs to the next one: a value that was given, such as a name, has a line break.
    """
    known = isinstance(error, ValueError | OSError)
    text = _of_file(error) if isinstance(error, OSError) else str(error) if known else described(error)
    text = with_hints_beside(text.strip())
    if "HINT" not in text:
        text = f"{text.rstrip()} {_GENERAL_HINT.format(command=command)}"
    lines: list[str] = []
    begun = ""
    for line in filter(None, map(str.rstrip, text.splitlines())):
        begun = f"{begun} {line.lstrip()}" if begun else line
        if "HINT" in line or _HEADING.search(line):
            lines, begun = [*lines, begun], ""
    longest = LONGEST_LINE - len(f"lipdp {command}: ")
    return "\n".join(shortened(line, longest) for line in [*lines, begun] if line)


def _of_file(error: OSError) -> str:
    """Returns the message of the operating system's error without its number, and with the file if there is one."""
    if type(error).__str__ is not OSError.__str__ or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename is not None else f"{error.strerror}."
