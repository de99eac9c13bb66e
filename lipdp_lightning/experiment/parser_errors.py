"""Turns the parser's long messages into one line: which key, what was given, what is expected, and the nearest known
key.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence

from .one_line import one_line, shortened

SHOW_KEYS = "HINT: `lipdp fit --config FILE --print_config` shows every key."
_KEY = re.compile(r"Parser key \"([^\"]+)\":\s*")
_PROBLEM = re.compile(r"^(?P<indent>[ ]*)(?:- )?Problem with given class_path '(?P<path>[^']*)':\s*", re.MULTILINE)
_UNKNOWN = re.compile(
    r"(?:unrecognized arguments: (?:--)?(?P<argument>[^\s=]+)|does not accept (?:option|nested key|key) "
    r"'(?P<group>[^']+)'|(?:Option|Key) '(?P<option>[^']+)' is not (?:accepted|expected))"
)
_NO_NAME = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_SHORT_NAME = re.compile(r"(?<![\w.])(?P<module>callbacks|data_modules)\.(?P<name>[A-Za-z]\w*)")
_GROUP = re.compile(r"[Gg]roup '([^']+)' does not accept")
_NO_CLASS = ("Import path", "Not a valid subclass", "no signature found")
_KINDS = {"float": "a finite number", "int": "a whole number", "bool": "true or false", "str": "text"}
_KINDS |= {"dict": "a mapping", "list": "a list", "Iterable": "a list", "NoneType": "null"}


def parser_error(message: str, known: Sequence[str] = ()) -> str:
    """Returns the parser's message as one line.

    Args:
        message: the message of jsonargparse, over many lines: every type that it has tried, and what was given.
        known: the known keys; the nearest of them is named if a key is unknown.
    """
    key, cause = _cause(message)
    hint = _misspelt(message) or _nearest(message, key, known)
    if "did you mean" in hint:
        cause = cause.partition(" HINT")[0]
    if not cause.endswith((".", "?", "!")):
        cause += "."
    return f"{key + ': ' if key else ''}{cause} {hint}" if "HINT" not in cause else f"{key}: {cause}"


def _cause(text: str, owner: str | None = None) -> tuple[str, str]:
    """Returns the dotted key that is wrong, and what is wrong with it, from the deepest of the nested messages."""
    found = _KEY.match(text.strip())
    if found:
        key, cause = _cause(text.strip()[found.end() :], owner)
        inside = f"{found[1]}.{key}" if key and not key.startswith(found[1]) else key or found[1]
        return inside, cause
    if (nested := _PROBLEM.search(text)) is not None:
        inner = _inside(text[nested.end() :], len(nested["indent"]))
        key, cause = _cause(inner, nested["path"])
        if key:
            return f"init_args.{key}", cause
        return "", f"{nested['path']}: {cause}"
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()]
    return "", _best(lines, _value(text))


def _inside(text: str, indent: int) -> str:
    """Returns the part that belongs to a message: up to the next one that is not nested deeper."""
    kept: list[str] = []
    for number, line in enumerate(text.splitlines()):
        depth = len(line) - len(line.lstrip())
        if number and (line.startswith(("Given value", "Subtypes")) or (line.lstrip()[:2] == "- " and depth <= indent)):
            break
        kept.append(line)
    return "\n".join(kept)


def _value(text: str) -> str | None:
    """Returns what was given, if it can be shown without dumping a whole object."""
    found = re.search(r"(?:Given value:|Got value:)\s*(.+)", text)
    if found is None or "Namespace(" in found[1]:
        return None
    nested = re.fullmatch(r"NestedArg\(key='.*', val='(.*)'\)", found[1].strip())
    return shortened(nested[1] if nested else found[1].strip())


def _best(lines: list[str], value: str | None) -> str:
    """Returns the most informative line."""
    for line in lines:
        if "HINT" in line:
            return shortened(one_line(line.split("Given value")[0]), 300)
    for line in lines:
        if line.startswith(_NO_CLASS):
            return shortened(one_line(re.sub(r"<[^>]*>", "", line.split("Got value:")[0])), 200)
    expected = [kind for line in lines for kind in _expected(line)]
    if expected:
        given = "this is" if value is None else f"{value!r} is"
        return f"{given} not {' or '.join(dict.fromkeys(expected))}"
    said = [line for line in lines if not line.startswith(("Subtypes", "Errors:", "Given value", "Does not validate"))]
    first = "; ".join(dict.fromkeys(line for line in said if not line.startswith("Expected a")))
    plain = re.sub(r"<class '([^']*)'>", r"\1", _KEY.sub("", first or "the value does not fit the key"))
    return shortened(one_line(plain), 240)


def _expected(line: str) -> list[str]:
    if (found := re.match(r"Expected an? <class '(?:[\w.]*\.)?(\w+)'>", line)) is not None:
        return [_KINDS.get(found[1], found[1])] if found[1] != "NoneType" else []
    if line.startswith(("Expected a dot import path", "Unexpected import path")):
        return ["a class path"]
    if (found := re.match(r"Expected an? typing\.Literal\[(.*?)\]", line)) is not None:
        return [f"one of {found[1]}"]
    return []


def _misspelt(message: str) -> str:
    """Returns the hint for a class path whose module has a class of nearly the same name, or nothing."""
    found = _NO_NAME.search(message) or _SHORT_NAME.search(message)
    if found is None or _UNKNOWN.search(message):
        return ""
    module = found["module"]
    ours = found.re is _SHORT_NAME
    home = importlib.import_module(f"lipdp_lightning.{module}") if ours else sys.modules.get(module)
    close = difflib.get_close_matches(found["name"], getattr(home, "__all__", vars(home) if home else ()), n=1)
    return f"HINT: did you mean {module}.{close[0]}?" if close else ""


def _nearest(message: str, key: str, known: Sequence[str]) -> str:
    """Returns the hint, which names the known key that an unknown one is closest to."""
    if "expected one argument" in message:
        return "HINT: write a value that begins with a minus after an equals sign, as in --key=-1."
    found = _UNKNOWN.search(message)
    if found is None:
        return SHOW_KEYS
    wrong = found["argument"] or found["group"] or found["option"]
    owner = _PROBLEM.search(message)
    if owner is not None:
        names = list(_parameters([p["path"] for p in _PROBLEM.finditer(message)][-1]))
    else:
        group = _GROUP.search(message)
        wrong = f"{group[1]}.{wrong}" if group is not None and not wrong.startswith(group[1] + ".") else wrong
        names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if close:
        return f"HINT: did you mean {close[0]}?"
    return f"HINT: known are {shortened(', '.join(names), 160)}." if owner is not None and names else SHOW_KEYS


def _parameters(path: str) -> tuple[str, ...]:
    module, _, name = path.rpartition(".")
    try:
        return tuple(n for n in inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return ()
