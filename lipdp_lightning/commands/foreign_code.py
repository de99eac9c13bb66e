"""Which code a run's stored configuration may name when the run was not made in this place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import yaml

# parts of installed packages that build networks, data, optimizers and measures
_KNOWN = (
    "lipdp_lightning.", "data_modules.", "callbacks.", "torch.nn.", "torch.optim.", "lightning.pytorch.callbacks.",
)  # fmt: skip
_IMPORT_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")


def check_named_code(text: str, path: object) -> None:
    """Refuse a stored configuration that names code outside this package, torch and Lightning.

    Whoever wrote the file chooses which classes and functions of this machine are called, and with which arguments.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read ({reason}). HINT: restore it from a backup.") from error
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
    """Whether a text is the import path of anything but known classes (a file's name may look like one)."""
    if not _IMPORT_PATH.match(text) or text.startswith(_KNOWN):
        return False
    try:
        return find_spec(text.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return True
