"""Resolves the short names of this project's classes, as in ``class_path: data_modules.Digits``.

In a configuration, ``callbacks`` and ``data_modules`` stand for the packages of that name below ``lipdp_lightning``. A
project may have folders of these names, too: a name that this project does not have is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

PARSER_MODE = "yaml_with_short_names"
# called with every mapping and list that the parser reads, those of files that a configuration names included
CHECK: ContextVar[Callable[[Any], None]] = ContextVar("check", default=lambda content: None)
_SHORT = re.compile(r"(?P<package>callbacks|data_modules)\.(?P<name>[A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*")


@cache
def full_name(path: str) -> str:
    """Returns the import path that a class path stands for.

    Example::

        full_name("data_modules.Digits")  # "lipdp_lightning.data_modules.Digits"
        full_name("callbacks.MyOwn")  # "callbacks.MyOwn", of a folder of the user's
    """
    match = _SHORT.fullmatch(path)
    if match is None:
        return path
    package = f"lipdp_lightning.{match['package']}"
    name = match["name"]
    is_ours = name in import_module(package).__all__ or find_spec(f"{package}.{name}") is not None
    return f"lipdp_lightning.{path}" if is_ours else path


def with_full_names(content: Any) -> Any:
    """Returns a configuration in which no class path is a short name."""
    if isinstance(content, list):
        return [with_full_names(item) for item in content]
    if not isinstance(content, dict):
        return content
    replaced = {key: with_full_names(value) for key, value in content.items()}
    if isinstance(replaced.get("class_path"), str):
        replaced["class_path"] = full_name(replaced["class_path"])
    return replaced


def with_full_words(arguments: Sequence[str]) -> list[str]:
    """Returns the words of a command line in which no value of an option is a short name."""
    words = []
    for word in arguments:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(f"{option}{equals}{full_name(value)}")
    return words


def _load(text: str) -> Any:
    content = with_full_names(get_loader("yaml")(text))
    CHECK.get()(content)
    return content


set_loader(PARSER_MODE, _load, exceptions=(yaml.YAMLError,))
