"""Keeps features on disk: computed once, and never used for another extractor, other rows, or after damage.

Features of private rows are private: the directory and its files are readable by their owner alone. The name of a file
is a digest of the extractor's identity and of the rows; its content is described by a JSON file beside it, written
last, with a SHA-256 of the content. Everything is compared when the file is opened.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import OWNER_ONLY, read_json, write_bytes_atomically
from .extractor import FeatureExtractor

_FORMAT = 1
_SIGNATURE = 8  # number of projections of the probe's features
_ROUNDING = 1e-3
_PIECE = 1 << 24  # bytes hashed at a time
_LARGE = 5000  # from this many rows on, a message tells that features are computed


@dataclass(frozen=True)
class Source:
    """The rows to compute features of: their number, a digest of their content, and a function that reads a slice."""

    rows: int
    digest: bytes
    read: Callable[[slice], Tensor]


class KeptRows:
    """Features in a file, in float32; a slice of rows is read on demand and becomes a tensor of its own."""

    def __init__(self, path: Path, shape: Sequence[int]) -> None:
        self.path, self.shape = path, tuple(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        # the mapping ends with the slice, so that nothing stays in this process's memory
        return torch.from_numpy(np.array(np.load(self.path, mmap_mode="r", allow_pickle=False)[rows]))


@dataclass(frozen=True)
class _Contents:
    format: int
    extractor: str
    identity: str
    source: str
    shape: list[int]
    sha256: str
    signature: list[float]


def cached_features(
    directory: Path, extractor: FeatureExtractor, source: Source, batch_size: int = 256, device: str = "cpu"
) -> KeptRows:
    """Returns the features (rows, *feature_shape) of every row, in float32, from a file.

    The file is made if there is none. A file that does not hold what its name says is refused and not replaced, since
    another user of the directory may be at fault.

    Args:
        directory: the directory of the cache, readable by its owner alone.
        extractor: computes the features.
        source: the rows.
        batch_size: rows per call of the extractor.
        device: the device that computes features.

    Raises:
        ValueError: if the directory cannot be used, or if the file is damaged or belongs to something else.
    """
    name = hashlib.sha256(extractor.identity() + source.digest + source.rows.to_bytes(8, "big")).hexdigest()[:40]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(directory / f"{name}.lock"):  # several processes may want the same features at the same time
            if not (directory / f"{name}.json").exists():
                _compute(directory, name, extractor, source, batch_size, device)
            return _open(directory, name, extractor, source)
    except OSError as error:
        raise ValueError(
            f"the feature cache {directory} cannot be used: {error.strerror or error}. HINT: set LIPDP_CACHE, or the "
            "option cache_dir, to a folder of your own with room for the features."
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compute(
    directory: Path, name: str, extractor: FeatureExtractor, source: Source, batch_size: int, device: str
) -> None:
    extractor.check_frozen()
    shape = (source.rows, *extractor.feature_shape)
    if source.rows >= _LARGE:  # the message leaves out their number, which is private
        sys.stderr.write(f"computing {type(extractor).__name__} features once, for {str(directory)!r}\n")
    for left in directory.glob(f".{name}.*.part"):  # left by a killed process; this process holds the lock
        left.unlink(missing_ok=True)
    temporary = directory / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        kept = np.lib.format.open_memmap(temporary, "w+", np.float32, shape)
        moved = extractor.to(device)
        with torch.no_grad():
            for start in range(0, source.rows, batch_size):
                rows = slice(start, min(start + batch_size, source.rows))
                kept[rows] = moved(source.read(rows).to(device)).to("cpu", torch.float32).numpy()
        extractor.to("cpu")
        kept.flush()
        del kept
        contents = _Contents(
            _FORMAT, type(extractor).__name__, extractor.identity().hex(), source.digest.hex(), list(shape),
            _sha256(temporary), signature(extractor),
        )  # fmt: skip
        os.replace(temporary, directory / f"{name}.npy")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    write_bytes_atomically(directory / f"{name}.json", json.dumps(asdict(contents), indent=1).encode(), OWNER_ONLY)


def _open(directory: Path, name: str, extractor: FeatureExtractor, source: Source) -> KeptRows:
    data, beside = directory / f"{name}.npy", directory / f"{name}.json"
    contents = _read_contents(beside)
    problems = []
    if contents.get("identity") != extractor.identity().hex():
        problems.append(f"it holds features of another extractor ({contents.get('extractor', 'unknown')})")
    if contents.get("source") != source.digest.hex():
        problems.append("it belongs to other rows")
    expected = [source.rows, *extractor.feature_shape]
    if contents.get("shape") != expected:
        problems.append(f"its shape is {contents.get('shape')} and not {expected}")
    if contents.get("format") != _FORMAT:
        problems.append("it was written in another format")
    if not problems and not _alike(contents.get("signature"), signature(extractor)):
        problems.append("the extractor gives other features than when it was written")
    if not problems and (damage := _damage(data, expected, str(contents.get("sha256")))):
        problems.append(damage)
    if problems:
        raise ValueError(
            f"the cached features {data} cannot be used: {'; '.join(problems)}. HINT: delete that file and "
            f"{beside.name} beside it; the features are then computed again."
        )
    return KeptRows(data, expected)


def signature(extractor: FeatureExtractor) -> list[float]:
    """Returns a few numbers that depend on the features of a fixed noise image; they change if the code changes and the
    settings do not.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.rand(2, *extractor.input_shape, generator=generator)
    with torch.no_grad():
        features = extractor(probe).flatten().double()
    signs = torch.randint(0, 2, (_SIGNATURE, features.numel()), generator=generator).double() * 2 - 1
    return [float(features.norm()), *(signs @ features).tolist()]


def _alike(stored: Any, found: list[float]) -> bool:
    """Compares two signatures up to the rounding of another processor."""
    if not isinstance(stored, list) or len(stored) != len(found):
        return False
    tolerance = _ROUNDING * max(1e-9, found[0])
    return all(isinstance(a, float) and abs(a - b) <= tolerance for a, b in zip(stored, found, strict=True))


def _read_contents(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except ValueError:
        return {}
    return contents if isinstance(contents, dict) else {}


def _damage(data: Path, shape: list[int], sha256: str) -> str | None:
    """Returns what is wrong with the file, or None."""
    if not data.exists():
        return "it is missing"
    try:
        kept = np.load(data, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        return f"it is truncated or damaged ({str(error).splitlines()[0]})"
    if list(kept.shape) != shape or kept.dtype != np.float32:
        return f"it holds {kept.dtype} of shape {list(kept.shape)}"
    return None if _sha256(data) == sha256 else "its content has changed since it was written"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
