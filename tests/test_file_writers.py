"""Files are written by the functions of files.py, whose errors name the file, and by nothing else."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lipdp_lightning.files import FileNotWritten, remove_left_overs, write_bytes_atomically
from lipdp_lightning.report.atomic import write_all_atomically, write_atomically

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lipdp_lightning", "callbacks", "data_modules")
# appended to or locked, and not replaced; downloads go through names of their own and compare digests
OWN_WAY = {
    "lipdp_lightning/files.py", "lipdp_lightning/report/atomic.py", "lipdp_lightning/curves/columns.py",
    "lipdp_lightning/training/step_record.py", "lipdp_lightning/training/run_directory.py",
    "lipdp_lightning/training/checkpoint_files.py", "lipdp_lightning/tuning/storage.py",
    "lipdp_lightning/studies/forecast.py", "lipdp_lightning/studies/wide_evidence.py",  # continued line by line
    "lipdp_lightning/studies/reproduce/store.py", "lipdp_lightning/features/cache.py", "data_modules/downloads.py",
    "data_modules/cifar.py",
}  # fmt: skip
METHODS = {
    "write_text", "write_bytes", "tofile", "to_csv", "savetxt", "savez", "savez_compressed", "memmap",
    "copyfile", "copy2", "copytree", "copyfileobj",
}  # fmt: skip


def writers(source: str) -> Iterator[str]:
    """Calls that write a file: opened with a mode that writes, or methods and functions that do so themselves."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        writes = any(
            isinstance(m, str) and len(m) <= 3 and set(m) <= set("rwaxbt+") and set(m) & set("wax+") for m in modes
        )
        if (name.rpartition(".")[2] == "open" and writes) or name.rpartition(".")[2] in METHODS or name == "np.save":
            yield f"line {node.lineno}: {name}"


def test_every_file_is_written_by_the_shared_functions() -> None:
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            # measurements of this machine, by hand
            if path not in OWN_WAY and not path.startswith("lipdp_lightning/bench/"):
                found |= {path: calls} if (calls := list(writers(file.read_text(encoding="utf-8")))) else {}
    for path in ("lipdp_lightning/privacy/statistics.py", "lipdp_lightning/commands/predict.py"):
        found.pop(path, None)  # savez into memory
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "open(p, 'w')",
        "path.open('ab')",
        "os.fdopen(h); open(p, mode='x')",
        "p.write_text(t)",
        "np.save(p, a)",
        "shutil.copyfile(a, b)",
    ],
)
def test_a_writer_would_be_noticed(source: str) -> None:
    assert list(writers(source))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
@pytest.mark.parametrize(
    "write",
    [
        lambda p: write_bytes_atomically(p, b"new"), lambda p: write_atomically(p, "new"),
        lambda p: write_all_atomically(p.parent, {p.name: "new"}),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str, write: Any
) -> None:
    target = tmp_path / "kept.txt"
    target.write_text("old")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    try:
        write(target)
    except FileNotWritten as error:
        text = str(error)
        assert error.errno == code and str(tmp_path) in text and "HINT" in text and "\n" not in text
        assert os.strerror(code) in text and "unchanged" in text
        assert target.read_text() == "old"
    else:
        assert call == "mkdir", "the folder was there"
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_left_overs_are_those_of_our_writers_alone(tmp_path: Path) -> None:
    kept = [".hidden.tmp", "x.12.0badcafe.part", ".x.y.0badcafe.part", ".x.12.0badcafe.txt", ".x.12.bad.part"]
    for name in [*kept, ".x.ckpt.12.0badcafe.part", ".x.12.0badcafe0bad.tmp"]:
        (tmp_path / name).touch()
    (tmp_path / ".d.12.0badcafe.tmp").mkdir()
    remove_left_overs(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, ".d.12.0badcafe.tmp"])
    remove_left_overs(tmp_path / "nowhere")
