"""Finds the entries: every module of the folder `entries` with `ENTRY` or `ENTRIES`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass

from lipdp_lightning.studies.reproduce.entry import Entry

PACKAGE = "lipdp_lightning.studies.reproduce.entries"


@dataclass(frozen=True)
class Listed:
    """An entry, and the module that a worker imports to have it too."""

    entry: Entry
    module: str


def entries_of(module: str) -> list[Listed]:
    """Returns the entries of one module."""
    loaded = importlib.import_module(module)
    found: Iterable[Entry] = getattr(loaded, "ENTRIES", None) or (loaded.ENTRY,)
    return [Listed(entry, module) for entry in found]


def catalogue(package: str = PACKAGE) -> dict[str, Listed]:
    """Returns all entries by name, in the order of their names."""
    paths = importlib.import_module(package).__path__
    found: dict[str, Listed] = {}
    for information in pkgutil.iter_modules(paths, f"{package}."):
        for listed in entries_of(information.name):
            assert listed.entry.name not in found, f"two entries are named {listed.entry.name}"
            found[listed.entry.name] = listed
    return dict(sorted(found.items()))


def find(name: str, package: str = PACKAGE) -> Listed:
    """Returns the entry of that name; raises ValueError with the nearest names if there is none."""
    known = catalogue(package)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "`lipdp reproduce --list` shows them."
        raise ValueError(f"there is no entry {name!r}. HINT: {hint}")
    return known[name]
