"""Makes the objects of the classes that a configuration names, and says which of them failed under which key."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, _InstantiatorFn

from .config_file import config_files
from .one_line import described, one_line
from .short_names import full_name

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_INSIDE = re.compile(rf"class_path['\"]?\s*[:=]\s*['\"]?({_PATH.pattern})")


class Constructors:
    """Makes the objects that class paths name, and remembers the first error of a constructor."""

    def __init__(self, cli: LightningCLI) -> None:
        self._cli = cli
        self._failed: tuple[type, dict[str, Any], Exception] | None = None

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        try:
            for kind, key in ((LightningModule, "model"), (LightningDataModule, "data")):
                if issubclass(class_type, kind):
                    make = _InstantiatorFn(cli=self._cli, key=key)
                    return make(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)
            return class_type(*args, **kwargs)
        except Exception as error:
            self._failed = self._failed or (class_type, kwargs, error)
            raise

    def make_all(self) -> Any:
        """Returns the configuration with an object for each class path.

        Raises:
            ValueError: if a constructor fails; the message names its key in one line.
        """
        return self.make(self._cli.parser, self._cli.config)

    def make(self, parser: Any, config: Any) -> Any:
        """Returns a configuration of a parser with an object for each class path; raises what `make_all` does."""
        parser.add_instantiator(self, object, subclasses=True, prepend=True)
        try:
            return parser.instantiate_classes(config)
        except Exception as error:
            raise ValueError(self._refusal(*(self._failed or (None, {}, error)))) from error

    def _refusal(self, failed: type | None, options: dict[str, Any], error: Exception) -> str:
        name = "" if failed is None else failed.__name__
        named = [p for p in class_paths(self._cli.config) if name and p[1].rpartition(".")[2] == name]
        # of several objects of one class, the one that was given these options
        key = next((p[0] for p in named if _given(p[2], options)), named[0][0] if named else "")
        where = f"{key}: " if key else ""
        if isinstance(error, ValueError) and "HINT" in str(error):
            return where + str(error)
        return f"{where}{name or 'an object'} cannot be made, {described(error)}. HINT: check its init_args."


def _given(init_args: dict[str, Any], options: dict[str, Any]) -> bool:
    """Returns whether a constructor was called with these plain values; those of objects are not compared."""
    plain = {n: v for n, v in init_args.items() if n in options and isinstance(v, bool | int | float | str)}
    return all(type(options[n]) is type(v) and options[n] == v for n, v in plain.items())


def class_paths(content: Any, key: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the key, the class path and the options of every object in a configuration."""
    content = content.as_dict() if hasattr(content, "as_dict") else content
    if isinstance(content, dict):
        path = content.get("class_path")
        if isinstance(path, str):
            yield key, path, content.get("init_args") or {}
        for name, value in content.items():
            inside = f"{key}.{name}" if key else str(name)
            yield from class_paths(value, inside)
    elif isinstance(content, list):
        for item in content:
            yield from class_paths(item, key)


def import_problem(error: Exception, arguments: Sequence[str]) -> str:
    """Returns the message for an error that is not the parser's own, such as a module that fails when it is
    imported.
    """
    problem = failed_import(arguments)
    if problem is not None:
        return problem
    return f"the configuration cannot be used, {described(error)}. HINT: LIPDP_TRACEBACK=1 shows where it fails."


def failed_import(arguments: Sequence[str]) -> str | None:
    """Returns the message for the first module that a class path names and that raises when it is imported, or None."""
    for key, path in _named(arguments):
        try:
            importlib.import_module(full_name(path).rpartition(".")[0])
        except ImportError:
            continue
        except Exception as cause:
            problem = f"{described(cause)}. HINT: `python -c 'import {path.rpartition('.')[0]}'` shows where"
            return f"{key}: {path} cannot be imported, {problem}."
    return None


def _named(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields key and class path of everything that configurations and options name, without importing anything."""
    for file in config_files(arguments):
        with open(file, encoding="utf-8-sig") as stream:
            yield from (found[:2] for found in class_paths(yaml.safe_load(stream)))
    for option, value in itertools.pairwise(arguments):
        if option == "--config" and "\n" in value:
            yield from (found[:2] for found in class_paths(yaml.safe_load(value)))
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in itertools.pairwise(words):
        key = option.removeprefix("--")
        if option.startswith("--") and _PATH.fullmatch(value):
            yield key, value
        if key == "config":
            continue
        for path in _INSIDE.findall(value):
            yield key, path


def optimizer_problem(error: Exception, schedule: bool) -> str:
    """Returns the message for an optimizer whose constructor fails, or for its schedule."""
    problem = one_line(str(error)) if isinstance(error, ValueError | TypeError) else described(error)
    what, keys = "the optimizer", "optimizer.init_args"
    if schedule:
        what, keys = "the optimizer or its lr_scheduler", "optimizer.init_args and lr_scheduler.init_args"
    return f"{what} cannot be made: {problem}. HINT: check {keys}."
