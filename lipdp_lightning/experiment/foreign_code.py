"""Decides which code a run's stored configuration may name when the run was made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import yaml

from .short_names import CHECK, full_name

# the parts of installed packages that build networks, data, optimizers and metrics
_KNOWN = ("lipdp_lightning.", "torch.nn.", "torch.optim.", "lightning.pytorch.callbacks.")
# where what is named there may be defined: other rooms have functions that make what a text names
_HOMES = (
    *(f"lipdp_lightning.{room}." for room in (
        "augmentations", "bounds.losses", "callbacks", "data_modules", "features", "layers", "models", "schedules",
    )), *_KNOWN[1:],
)  # fmt: skip


def refuse_projects(text: str, place: object) -> None:
    """Refuses the configuration of a run by ``privatize`` or ``Engine``, whose network is a project's own code."""
    if text.startswith("made_private:") or not text.strip():
        raise ValueError(
            f"{place} is of a run by privatize() or Engine, whose network and data are made by a script and not by a "
            "configuration. HINT: evaluate it in the script; `lipdp export` writes its weights, "
            "and module.load_state_dict(load_release(file).state_dict) reads them."
        )


def check_named_code(text: str, path: object) -> None:
    """Refuses a stored configuration that names code outside this package, torch and Lightning.

    The author of the file chooses which classes and functions of this machine are called, and with which arguments.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read ({reason}). HINT: restore it from a backup.") from error
    _refuse(content, path)


@contextmanager
def known_code_only(text: str, path: object, *, trusted: bool) -> Iterator[None]:
    """Refuses foreign code in a stored configuration and, while it is parsed in the block, in the files that it names.

    The parser takes the name of another file for the value of a group, or of any key whose value is an object.
    """
    if trusted:
        yield
        return
    check_named_code(text, path)

    def check(content: Any) -> None:
        if isinstance(content, dict | list):  # a single name is an option that the user gives
            _refuse(content, path)

    token = CHECK.set(check)
    try:
        yield
    finally:
        CHECK.reset(token)


def _refuse(content: Any, path: object) -> None:
    named = sorted({name for name in _strings(content) if _is_foreign(name)})
    if named:
        more = " and more" if named[5:] else ""
        raise ValueError(
            f"this run directory was copied here, and its {path} names code outside this package: "
            f"{', '.join(named[:5])}{more}. HINT: read the file; if you trust all that it names, add --trust_config."
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value


def _is_foreign(text: str) -> bool:
    """Returns whether a text is the import path of anything but known classes (a file's name may look like one)."""
    text = full_name(text)
    if "." not in text or not all(name.isidentifier() for name in text.split(".")):
        return False
    if text.startswith(_KNOWN):
        return not _defined_in_known(text)
    try:
        return find_spec(text.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return True


def _defined_in_known(text: str) -> bool:
    """Returns whether the target of a path below a known package is defined in one of its homes; modules there import
    others, such as os.
    """
    names = text.split(".")
    found: Any = import_module(names[0])
    for end, name in enumerate(names[1:], 2):
        module = _module(".".join(names[:end])) if end < len(names) and isinstance(found, ModuleType) else None
        found = getattr(found, name, None) if module is None else module
        if found is None:
            return True  # nothing of that name exists, so nothing is called
        home = f"{found.__name__ if isinstance(found, ModuleType) else getattr(found, '__module__', '')}."
        on_the_way = isinstance(found, ModuleType) and any(known.startswith(home) for known in _HOMES)
        if not (home.startswith(_HOMES) or on_the_way):
            return False
    return not isinstance(found, ModuleType)


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None
