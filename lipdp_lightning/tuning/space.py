"""Declares what is searched: dotted keys of a configuration, each with a range or a list of values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# epsilons of trials that differ in these settings belong to different relations and cannot be compared
FIXED = ("delta", "adjacency", "accountant", "max_examples_per_unit", "allow_noncertified", "secure")
EXAMPLE = "optimizer.init_args.lr: {low: 0.001, high: 0.1, log: true}"
_RANGE = {"low", "high", "log", "integer"}


@dataclass(frozen=True)
class Range:
    """All numbers from low to high, spaced evenly or evenly in the logarithm."""

    low: float
    high: float
    log: bool = False
    integer: bool = False


@dataclass(frozen=True)
class Choice:
    """One value out of a list."""

    values: tuple[Any, ...]


Space = dict[str, Range | Choice]


def read_space(path: Path, known: Mapping[str, Any]) -> Space:
    """Returns the space of a YAML file; ``known`` are the keys of the configuration. The error has one line per
    problem.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--space {path} cannot be read ({error.strerror}). HINT: name a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--space {path} is not YAML ({' '.join(str(error).split())}). HINT: {EXAMPLE}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"--space {path} is empty: there is nothing to search. HINT: {EXAMPLE}")
    problems: list[str] = []
    space: Space = {}
    for key, entry in content.items():
        try:
            space[str(key)] = _parameter(str(key), entry, known)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"--space {path}: " + "; ".join(problems))
    return space


def _parameter(key: str, entry: Any, known: Mapping[str, Any]) -> Range | Choice:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        raise ValueError(
            f"{key} is not a key of the configuration. HINT: {near[0] if near else 'see lipdp fit --print_config'}"
        )
    if key.startswith("trainer.") or key in {f"privacy.{name}" for name in FIXED}:
        raise ValueError(f"{key} cannot be searched: trials would not be comparable. HINT: set it in the configuration")
    if isinstance(known[key], Mapping) and "class_path" not in known[key]:
        raise ValueError(
            f"{key} is a group of settings, and a value of it would be a file that no cost of the search accounts for. "
            f"HINT: search single keys, such as {key}.{next(iter(known[key]), 'NAME')}"
        )
    if isinstance(entry, list):
        if not entry or len({repr(value) for value in entry}) < len(entry):
            raise ValueError(f"{key} has no values, or one twice. HINT: use [128, 256]")
        if any(isinstance(value, list | dict) for value in entry):
            raise ValueError(f"{key}: a value of a list is a number, a text, true, false or null. HINT: use [128, 256]")
        return Choice(tuple(entry))
    if isinstance(entry, dict) and {"low", "high"} <= set(entry) <= _RANGE:
        low, high = _number(key, entry["low"]), _number(key, entry["high"])
        log, integer = entry.get("log", False), entry.get("integer", False)
        flags = isinstance(log, bool) and isinstance(integer, bool)
        whole = not integer or (low.is_integer() and high.is_integer())
        if flags and whole and low < high and (low > 0 or not log):
            return Range(low, high, log, integer)
    raise ValueError(
        f"{key}: {entry!r} is neither a range nor a list. HINT: use {{low: 0.001, high: 0.1, log: true}}, or [128, 256]"
    )


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key}: {value!r} is not a number. HINT: YAML reads 1e-3 as text; write 0.001")
    return float(value)


def flat_keys(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every dotted key of a nested configuration; a mapping has its own key as well."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        found[key] = value
        if isinstance(value, Mapping):
            found |= flat_keys(value, f"{key}.")
    return found


def default_space(known: Mapping[str, Any], dataset_size: int, spends: bool = True) -> Space:
    """Returns learning rate and batch size around those of the configuration and, if ``spends``, the budget or the
    noise.
    """
    space: Space = {}
    if not spends:
        pass
    elif known.get("privacy.epsilon") is not None:
        space["privacy.epsilon"] = Range(0.5, 8.0, log=True)
    elif known.get("privacy.noise_multiplier"):
        noise = float(known["privacy.noise_multiplier"])
        space["privacy.noise_multiplier"] = Range(noise / 3, noise * 3, log=True)
    rate = known.get("optimizer.init_args.lr")
    if isinstance(rate, int | float) and rate > 0:
        space["optimizer.init_args.lr"] = Range(rate / 10, rate * 10, log=True)
    batch = int(known["privacy.batch_size"])
    sizes = [size for size in (batch // 2, batch, batch * 2) if 1 <= size <= dataset_size]
    space["privacy.batch_size"] = Choice(tuple(dict.fromkeys(sizes)))
    if str(known.get("privacy.method")).startswith("dpsgd"):
        space["privacy.clip_norm"] = Range(0.05, 20.0, log=True)
    return space


def plain(space: Space) -> dict[str, Any]:
    """Returns the space as a YAML file holds it."""
    return {key: list(p.values) if isinstance(p, Choice) else dict(vars(p)) for key, p in space.items()}
