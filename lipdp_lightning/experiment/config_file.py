"""Checks a configuration file as text, before any of its keys is known."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from .one_line import one_line, shortened

LARGEST_FILE = 1 << 20
MOST_VALUES = 100_000
LONGEST_NUMBER = 300
# a YAML parser takes time quadratic in the depth
_DEEP = re.compile(r"(?:[\[{]\s*){100}")


def config_files(arguments: Sequence[str]) -> list[str]:
    """Returns the files that the arguments name as configurations; an argument that holds YAML itself is not a file."""
    named = [b for a, b in itertools.pairwise(arguments) if a in ("--config", "-c")]
    named += [a.partition("=")[2] for a in arguments if a.startswith(("--config=", "-c="))]
    return [name for name in named if "\n" not in name and ": " not in name]


def check_config_file(path: str | Path, what: str = "configuration") -> None:
    """Checks that a file is one YAML mapping of moderate size, in which no key is given twice.

    Args:
        path: the file.
        what: what the file should hold, for the message.

    Raises:
        ValueError: if it is not; the message gives the reason and, where there is one, the line.
    """
    text = _text(Path(path))
    if _DEEP.search(text):
        raise _refusal(path, f"holds no {what}: it is nested too deeply", "start from configs/quickstart.yaml")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = f"is not YAML, {_yaml_problem(text, error)}"
        raise _refusal(path, problem, "two spaces for each level, and `key: value`") from None
    if not isinstance(root, yaml.MappingNode):
        kind = "it is empty" if root is None else "it is not a mapping of keys to values"
        raise _refusal(path, f"holds no {what}: {kind}", "start from configs/quickstart.yaml")
    if problems := list(dict.fromkeys(_problems(root))):
        raise _refusal(path, f"holds no {what}: {'; '.join(problems[:5])}", "give each key once, with one value")


def _refusal(path: str | Path, problem: str, hint: str) -> ValueError:
    return ValueError(f"{shortened(str(path), 120)} {problem}. HINT: {hint}.")


def _text(path: Path) -> str:
    if not path.exists():
        raise _refusal(
            path,
            "cannot be read: there is no such file",
            "check the path; `lipdp configs` lists those that come with the library",
        )
    if not path.is_file():
        raise _refusal(path, "cannot be read: it is not a file", "name a YAML file; configs/ holds examples")
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise _refusal(
            path, f"cannot be read: it is larger than {LARGEST_FILE >> 20} MB", "a configuration holds no data"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refusal(path, f"is not YAML: line {line} is not UTF-8 text", "save the file as UTF-8") from None
    if "\0" in text:
        raise _refusal(
            path, "is not YAML: it holds zero bytes and is not text", "name a YAML file; configs/ holds examples"
        )
    return text


def _yaml_problem(text: str, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    problem = one_line(str(getattr(error, "problem", None) or error))
    if mark is None:
        return shortened(problem, 160)
    lines = text.splitlines()
    if mark.line < len(lines) and lines[mark.line].lstrip(" ").startswith("\t"):
        problem = "a tab, where YAML wants spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {shortened(problem, 160)}"


def _problems(root: yaml.Node) -> Iterator[str]:
    """Yields keys given twice, tags, overlong numbers, and aliases that expand to more values than a file holds."""
    budget = itertools.count()
    # an aliased node is visited once for each alias, as the parser would copy it
    waiting: list[tuple[yaml.Node, tuple[int, ...]]] = [(root, ())]
    while waiting:
        node, above = waiting.pop()
        if next(budget) > MOST_VALUES or id(node) in above:
            yield "its aliases stand for more values than a configuration has"
            return
        where = f"line {node.start_mark.line + 1}"
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            yield f"{where}: the tag {shortened(node.tag)} is not allowed"
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            if re.fullmatch(r"[-+]?(?:0[0-9_]+|[0-9_]+(?::[0-9_]+)+)", node.value):
                yield f"{where}: {shortened(node.value)} is read as another number; put quotes around it if it is text"
            if len(node.value) > LONGEST_NUMBER:
                yield f"{where}: a number of {len(node.value)} digits"
            continue
        inside = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value != "<<" and str(key.value) in seen:
                    name, first = shortened(str(key.value)), seen[str(key.value)]
                    yield f"the key '{name}' is given twice, in lines {first} and {line}"
                seen.setdefault(str(key.value), line)
                waiting.append((value, inside))
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend((item, inside) for item in node.value)
