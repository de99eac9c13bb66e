"""The context of a run's noise: one digest of everything that decides its steps, the code included."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import lightning
import torch

from .. import __version__
from ..kernels.numeric_environment import numeric_environment, repeats_bits
from ..own_folders import OWN_FOLDERS
from .step_record import name_on_record

_ALWAYS = ("torch", "numpy", "lightning", "numba", "cryptography")
_DEEPEST = 3  # the depth to which containers within containers are searched


def code_digest(objects: Iterable[Any]) -> bytes:
    """Returns a 32-byte digest of the code behind the objects, as far as it can be found without running it.

    It covers this project's own packages; the files that define the objects' classes, the values of their attributes
    and the program itself; every file that those import, outside of the interpreter and of installed packages; and the
    versions of the installed packages among the imports. Comments and the layout of a user's file do not count. Code
    that cannot be found here (compiled code, a name that is imported by a string, a notebook's cells) changes the sums
    themselves, which also key the noise: see ``Mechanism.privatize_``.
    """
    found = _Closure()
    for name in sorted({"__main__", *(name for thing in objects for name in _modules_behind(thing))}):
        found.add(name)
    digest = hashlib.sha256(_own_code())
    for name, content in sorted(found.files.items()):
        digest.update(f"{name} {content}\n".encode())
    for package in sorted({*_ALWAYS, *found.packages}):
        digest.update(f"{package} {_version(package)}\n".encode())
    return digest.digest()


class _Closure:
    """Collects the users' files that define modules or are imported by them, and the installed packages they import."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.packages: set[str] = set()
        self._seen: set[str] = set()

    def add(self, name: str) -> None:
        """Adds a module, its packages, and what they import."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            top = name.split(".")[0]
            if name in self._seen or top == "lipdp_lightning":
                continue
            self._seen.add(name)
            path = None if top in sys.stdlib_module_names and top != "__main__" else _file_of(name)
            waiting += [name.rpartition(".")[0]] if "." in name else []
            if path is None:
                continue
            if _is_installed(path):
                self.packages.add(top)
                continue
            waiting += self._read(name, path)

    def _read(self, name: str, path: Path) -> list[str]:
        """Takes up a user's file, and returns the modules that it imports."""
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.files[name], imported = _parsed(path.read_bytes(), package)
        return list(imported)


@lru_cache(maxsize=128)
def _parsed(source: bytes, package: str) -> tuple[str, tuple[str, ...]]:
    """Returns a digest of a user's code, and the modules that it imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest(), ()
    imported = tuple(name for node in ast.walk(tree) for name in _imported(node, package))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yields the modules that a statement imports, and names that may be modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        if base:
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(name: str) -> Path | None:
    """Returns the source file of a module without importing it, or None."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None:
        paths: Any = None
        for depth in range(1, name.count(".") + 2):
            try:
                part = ".".join(name.split(".")[:depth])
                # a package in development may have its own finder, which knows top-level names
                spec = importlib.util.find_spec(part) if depth == 1 else PathFinder.find_spec(part, paths)
            except KeyError:  # a folder without __init__.py in a package that is not imported
                paths, file = [str(Path(folder, part.rpartition(".")[2])) for folder in paths], None
                continue
            except (ImportError, ValueError, AttributeError):
                return None
            if spec is None:
                return None
            paths, file = spec.submodule_search_locations or [], spec.origin
    if not isinstance(file, str) or not Path(file).is_file():
        return None
    return Path(file).resolve()


def _modules_behind(thing: Any, depth: int = 0) -> Iterator[str]:
    """Yields the names of the modules that define a thing, and of those that define the values of its attributes."""
    yield from _definers(thing)
    if depth == 0:
        for value in list(getattr(thing, "__dict__", {}).values()):
            yield from _held(value, 1)


def _held(value: Any, depth: int) -> Iterator[str]:
    yield from _definers(value)
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset | Mapping):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from _held(held, depth + 1)


def _definers(value: Any) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield from _definers(value.func)
    elif isinstance(value, MethodType):
        yield from _definers(value.__func__)
    elif isinstance(value, FunctionType):
        yield str(value.__module__)
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
            if isinstance(content, FunctionType | MethodType | type | functools.partial) and content is not value:
                yield str(getattr(content, "__module__", ""))
    else:
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        yield from (kind.__module__ for kind in kinds)


@lru_cache(maxsize=1)
def _libraries() -> tuple[Path, ...]:
    paths = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(path).resolve() for path in paths})


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(library) for library in _libraries())


@lru_cache(maxsize=1)
def _own_code() -> bytes:
    """Returns a digest of every file of this project's packages."""
    digest = hashlib.sha256()
    for folder in OWN_FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


@lru_cache(maxsize=128)
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        return str(getattr(sys.modules.get(package), "__version__", ""))


def can_repeat(strategy: Any) -> bool:
    """Returns whether a step that is taken again from the same state may have the same bits.

    If it cannot, every start of a run takes a new secret, and no step is ever released twice under one secret.
    """
    return repeats_bits(strategy.root_device)


def context_of(strategy: Any, trainer: lightning.Trainer, module: Any, data: Any) -> bytes:
    """Returns a digest of everything besides the weights that decides the sums of a step and of later steps.

    A run that is continued under another digest takes a new secret. Ranks that differ in it are refused.
    """
    schedules = [(type(c.scheduler).__name__, c.scheduler.state_dict()) for c in strategy.lr_scheduler_configs]
    clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    settings = f"{strategy.world_size} {strategy.chunks} {strategy.noise_mode} {strategy.precision_plugin.precision}"
    settings += f" {strategy.tf32}"
    shared = {
        "the version of this package": __version__.encode(),
        "the privacy plan": strategy.plan.digest() if strategy.plan is not None else b"",
        "the network": repr(module.network).encode(),
        "the loss or the input's bound": repr((module.loss, module.bounded_input)).encode(),
        "the training data": data.fingerprint(),
        "the released statistics": strategy.statistics.digest(),
        "the Strategy's settings": settings.encode(),
        "the augmentations": b"" if strategy.views is None else strategy.views.identity(),
        "the optimizer": repr((strategy.configured, schedules, clipping)).encode(),
        "the code": code_digest(_computed_by(strategy, module, data)),
    }
    run = strategy.restored.run
    restored = None if run is None else (run.step, run.secret)
    compared = {
        **shared,
        "checksum_every_n_steps": repr(strategy.checksum_every_n_steps).encode(),
        "the checkpoint to continue from": repr(restored).encode(),
    }
    strategy.ranks.check_equal({name: hashlib.sha256(value).digest() for name, value in compared.items()})
    parts = [*shared.values(), numeric_environment(strategy.root_device), str(torch.get_num_threads()).encode()]
    if strategy.is_global_zero:
        parts += [strategy.public_context, str(strategy.record.divergences).encode()]
        if strategy.record.divergences or _may_lack_steps(strategy):
            parts.append(os.urandom(16))  # a replay was not bit-identical, or the record could not show it
    if not can_repeat(strategy):
        parts.append(os.urandom(16))  # a replay would not be bit-identical, so every resume starts a new branch
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return strategy.ranks.agree(digest.digest())


def _may_lack_steps(strategy: Any) -> bool:
    """Returns whether the record may have lost steps that were released; these then count and are not repeated."""
    run = strategy.restored.run
    if run is None or not strategy.branches.is_here(run):
        return False
    reserved = strategy.branches.reserved_here(run)
    lacks: bool = strategy.record.may_lack_steps(name_on_record(run.secret), reserved, strategy.restored.record)
    return lacks


def _computed_by(strategy: Any, module: Any, data: Any) -> list[Any]:
    """Returns every object that computes on an example on its way into a sum."""
    augmentations = [] if strategy.views is None else [m for a in strategy.views.augmentations for m in a.modules()]
    return [*module.modules(), data, *augmentations]
