"""Stores the study on disk: one SQLite file, one search, one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..experiment.one_line import described
from ..extras import imported

NAME = "lipdp"
_NEEDS = "HINT: pip install 'lipdp-lightning[tune]'"


def optuna() -> Any:
    return imported("optuna", "a search")


def make_sampler(name: str, seed: int | None, trials: int) -> Any:
    """Returns a sampler of optuna.

    Args:
        name: tpe, botorch or random.
        seed: must differ between sessions of a study, or the second session repeats the settings of the first. None is
            secret: whoever knows the seed can tell from a trial's settings how many came before it.
        trials: the number of trials.
    """
    samplers = optuna().samplers
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    startup = max(2, min(10, trials // 3))  # random trials come first, and leave enough trials to use them
    if name == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=startup)
    try:
        botorch = import_module("optuna_integration").BoTorchSampler
    except ImportError as error:
        raise ValueError(f"--sampler botorch needs botorch and optuna-integration. {_NEEDS}.") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that the sampler is experimental
        return botorch(seed=seed, n_startup_trials=startup)


def identity_of(**parts: Any) -> dict[str, str]:
    """Returns digests of the parts that make two searches the same one."""
    text = {name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()}
    return {name: hashlib.sha256(value.encode()).hexdigest() for name, value in text.items()}


def open_study(path: Path, identity: Mapping[str, str], directions: Sequence[str], sampler: Any) -> Any:
    """Returns the study of this file, or a new one; raises ValueError if the file holds anything else."""
    library = optuna()
    library.logging.set_verbosity(library.logging.ERROR)
    existed = path.exists()
    hint = "HINT: use another --storage or --out, or the options that the search was started with."
    try:
        # the path is no part of the address, in which ? and braces have a meaning, and not :memory:
        creator = partial(sqlite3.connect, path.absolute(), check_same_thread=False)
        storage = library.storages.RDBStorage("sqlite:///study", engine_kwargs={"creator": creator})
        names = library.get_all_study_names(storage)
    except Exception as error:  # SQLAlchemy and SQLite have their own errors
        reason = described(error).partition(" [SQL")[0]
        raise ValueError(f"--storage {path} cannot be used as the file of a search ({reason}). {hint}") from error
    if existed and NAME not in names:
        found = f"the studies {', '.join(names)}" if names else "no search"
        raise ValueError(f"--storage {path} holds {found}, and none of lipdp tune. {hint}")
    study = library.create_study(
        study_name=NAME, storage=storage, directions=list(directions), sampler=sampler, load_if_exists=True
    )
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", dict(identity))
    elif known != dict(identity):
        changed = [name for name in identity if known.get(name) != identity[name]]
        raise ValueError(f"--storage {path} holds a search with another {' and '.join(changed)}. {hint}")
    return study


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process work on a study; a second one would take the trial of the first for an interrupted one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600), "w")  # noqa: SIM115 - held until the end
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(f"another process searches with {path}. HINT: wait for it, or use another --out.") from error
    try:
        yield
    finally:
        lock.close()
