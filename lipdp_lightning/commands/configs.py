"""Implements ``lipdp configs``: lists the configurations that come with the library, and copies them."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..files import write_bytes_atomically
from ..report.show import show

PACKAGED = (Path(__file__).resolve().parents[1] / "configs").resolve()
"""The folder of the configurations that come with the library."""

WIDTH = 120
"""The length of the longest summary, in characters."""

_OPTIONS = ("--config", "-c")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations to copy; without any, all are listed")
    parser.add_argument("--to", default=".", metavar="FOLDER", help="folder that the copies are written to")


def run(args: argparse.Namespace) -> int:
    if not args.names:
        width = max(len(path.stem) for path in packaged())
        show("".join(f"{path.stem:<{width}}  {summary(path)}\n" for path in packaged()))
        return 0
    for target in copied(args.names, Path(args.to)):
        show(f"{target}\n")
    return 0


def packaged() -> list[Path]:
    """Returns the files of the configurations that come with the library, by name."""
    return sorted(PACKAGED.glob("*.yaml"))


def summary(path: Path) -> str:
    """Returns the first sentence of the comment that a configuration begins with, shortened where it is long."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    sentence = text.partition(". ")[0]
    return textwrap.shorten(f"{sentence.rstrip('.')}.", WIDTH, placeholder=" ...")


def copied(names: Sequence[str], folder: Path) -> list[Path]:
    """Copies configurations by name into a folder, and returns their new places.

    Raises:
        ValueError: if a name is unknown, or a file is there already; nothing is copied then.
    """
    sources = [_find(name) for name in names]
    problems = [f"no configuration is called {name}" for name, source in zip(names, sources, strict=True) if not source]
    found = [(source, folder / source.name) for source in sources if source is not None]
    problems += [f"{target} exists already" for _, target in found if target.exists()]
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. HINT: `lipdp configs` lists the names, and --to names another folder."
        )
    for source, target in found:
        write_bytes_atomically(target, source.read_bytes())
    return [target for _, target in found]


def with_packaged(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line in which a name after ``--config`` is the path of a packaged configuration.

    A file of the current folder goes before a configuration of the same name.
    """
    named = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if equals and option in _OPTIONS:
            named.append(f"{option}={_path(value)}")
        else:
            named.append(_path(word) if before in _OPTIONS else word)
    return named


def _path(name: str) -> str:
    found = None if Path(name).exists() else _find(name)
    return name if found is None else str(found)


def _find(name: str) -> Path | None:
    return next((path for path in packaged() if name in (path.stem, path.name)), None)
