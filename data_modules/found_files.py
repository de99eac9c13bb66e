"""Finds and opens data files; every failure is a ValueError that names the file and ends in a HINT."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from pathlib import Path

_MAGIC = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"PAR1": "a Parquet file",
    b"%PDF": "a PDF document",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
}


def refusal(problem: str, hint: str) -> ValueError:
    """Returns the error of this package: what is wrong, then a line with the fix."""
    return ValueError(f"{problem}\nHINT: {hint}")


def kind_of(head: bytes) -> str | None:
    """Returns what a file's first bytes say it is, or None for plain text and unknown formats."""
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def refused_zip(path: Path) -> str:
    """Returns what a file is that is named like a zip archive and cannot be opened as one."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive that was cut off or damaged"
    return kind_of(head) or ("not a zip archive" if head else "empty")


def data_root(root: str | None, wanted: str = "", hint: str = "") -> Path:
    """Returns `root`, or the folder named by the environment variable LIPDP_DATA.

    If there is no such folder, the error says which file is wanted there (`wanted`) and how to get it (`hint`).
    """
    given, purpose = root or os.environ.get("LIPDP_DATA"), f", and {wanted} is looked for in one" if wanted else ""
    more = f"; {hint}" if hint else ""
    if not given:
        raise refusal(
            f"no data folder was given{purpose}", f"set the environment variable LIPDP_DATA or pass root{more}"
        )
    path = Path(given).expanduser()
    if not path.is_dir():
        raise refusal(f"the data folder {path} does not exist{purpose}", f"check LIPDP_DATA or the option root{more}")
    return path


def cache_root() -> Path:
    """Returns the folder for decoded data: LIPDP_CACHE, or ~/.cache/lipdp; it is never inside the data folder."""
    return Path(os.environ.get("LIPDP_CACHE") or "~/.cache/lipdp").expanduser()


def find_file(folder: Path, name: str, hint: str) -> Path:
    """Returns the path of `folder/name`, plain or gzipped."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise refusal(f"there is no file {folder / name} (nor {name}.gz)", hint)


def read_bytes(path: Path) -> bytes:
    """Returns the file's content, unpacked if its name ends in .gz; the name and the content must agree."""
    if not path.is_file():
        raise refusal(f"there is no file {path}", "check the path")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    if path.suffix == ".gz":
        data = _gunzip(path, data)
    elif data.startswith(b"\x1f\x8b"):
        raise refusal(f"{path} is a gzip file and its name does not end in .gz", "rename it to end in .gz")
    if not data:
        raise refusal(f"{path} is empty", "the download or export was cut off: fetch it again")
    return data


def _gunzip(path: Path, data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        found = kind_of(data) or ("something else" if data else "empty")
        raise refusal(f"{path} is named .gz and is {found}", "rename it, or fetch it again")
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        raise refusal(f"{path} is a damaged gzip file", "fetch it again") from None


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Returns the file as text; a byte order mark of UTF-8 is left out."""
    data = read_bytes(path)
    if (kind := kind_of(data)) is not None:
        raise refusal(f"{path} is {kind}, not a text table", "give the table itself, as CSV text")
    try:
        text = data.decode("utf-8-sig" if _is_utf8(encoding) else encoding)
    except UnicodeError as error:
        row = data.count(b"\n", 0, getattr(error, "start", 0)) + 1
        name = "UTF-8" if _is_utf8(encoding) else encoding
        raise refusal(f"{path}, row {row}: not {name} text", "save it as UTF-8, or declare its `encoding`") from None
    if "\0" in text:
        row = text.count("\n", 0, text.index("\0")) + 1
        raise refusal(f"{path}, row {row}: a zero byte, so it is not a text table", "save the table as UTF-8 CSV")
    return text
