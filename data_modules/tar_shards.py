"""Reads records from tar files as WebDataset writes them, without that package."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lipdp_lightning.data_modules.found_files import refusal

_IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "webp")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def shard_paths(path: str | Path) -> list[Path]:
    """Returns the files that a name stands for; `{000..003}` stands for four numbers of three digits."""
    found = _RANGE.search(str(path))
    if found is None:
        return [Path(path)]
    before, after = str(path)[: found.start()], str(path)[found.end() :]
    numbers = range(int(found[1]), int(found[2]) + 1)
    return [file for n in numbers for file in shard_paths(f"{before}{n:0{len(found[1])}d}{after}")]


class TarRecords:
    """The records of tar files, in their order: mappings from the end of a member's name to its content."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in shard_paths(self.path):
            yield from _records(file)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise refusal(f"there is no file {path}", "check the path")
    try:
        with tarfile.open(path) as archive:
            record: dict[str, Any] = {}
            key = None
            for member in archive:
                name = member.name.removeprefix("./")
                if not member.isfile() or Path(name).name.startswith("."):
                    continue
                folder, _, last = name.rpartition("/")
                stem, _, field = last.partition(".")
                if (folder, stem) != key:
                    if record:
                        yield record
                    record, key = {"__key__": f"{folder}/{stem}".lstrip("/")}, (folder, stem)
                file = archive.extractfile(member)
                assert file is not None  # the member is a file
                record[field.lower()] = _decoded(field.lower(), file.read(), path, member.name)
            if record:
                yield record
    except (tarfile.TarError, EOFError, OSError):
        raise refusal(f"{path} is not a tar file, or is damaged", "write or fetch it again") from None


def _decoded(field: str, content: bytes, path: Path, member: str) -> Any:
    """Returns the content of a member by the end of its name; other ends stay bytes."""
    kind = field.rpartition(".")[2]
    try:
        if kind in _IMAGES:
            from PIL import Image

            image = Image.open(io.BytesIO(content))
            image.load()
            return image
        if kind == "npy":
            return np.load(io.BytesIO(content), allow_pickle=False)
        if kind in ("cls", "txt", "text", "id", "index"):
            return content.decode("utf-8").strip()
        if kind == "json":
            return json.loads(content)
    except (ValueError, OSError, SyntaxError, EOFError):
        raise refusal(f"{path}, member {member}: not what its name says", "write it again") from None
    return content
