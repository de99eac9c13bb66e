"""Refuses a configuration with entries that are left to fill in, in it or in the schema that it names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lipdp_lightning.data_modules.placeholders import unfilled
from lipdp_lightning.data_modules.schema_yaml import schema_content

from .config_file import config_files


def refuse_unfilled(arguments: Sequence[str]) -> None:
    """Raises one ValueError with a line for each placeholder."""
    lines: list[str] = []
    for where, text in _texts(arguments):
        content = yaml.safe_load(text)
        lines += unfilled(content, where)
        schema = _schema_of(content)
        if schema is not None:
            lines += unfilled(schema_content(schema), str(schema))
    if lines:
        raise ValueError("\n".join(lines))


def _texts(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the configurations in files, and those that are arguments themselves."""
    for file in config_files(arguments):
        yield file, Path(file).read_text("utf-8-sig")
    for option, value in itertools.pairwise(arguments):
        if option == "--config" and "\n" in value:
            yield "the configuration", value


def _schema_of(content: Any) -> Path | None:
    """Returns the file that a configuration names as its schema, if there is one."""
    for key in ("data", "init_args", "schema"):
        content = content.get(key) if isinstance(content, dict) else None
    return Path(content) if isinstance(content, str) and Path(content).is_file() else None
