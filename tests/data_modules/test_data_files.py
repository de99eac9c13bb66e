"""Opening files: names and contents that disagree, damage, absence; always one ValueError naming the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lipdp_lightning.data_modules.found_files import data_root, find_file, read_bytes, read_text

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
PACKED = gzip.compress(b"a,b\n1,2\n" * 50)

BAD_FILES = {
    "table.csv.gz": (b"a,b\n1,2\n", "named .gz and is something else"),
    "zip.csv.gz": (b"PK\x03\x04rest", "named .gz and is a zip archive"),
    "cut.csv.gz": (PACKED[: len(PACKED) // 2], "damaged gzip"),
    "flipped.csv.gz": (PACKED[:20] + b"\xff\xff\xff" + PACKED[23:], "damaged gzip"),
    "packed.csv": (PACKED, "does not end in .gz"),
    "picture.csv": (PNG, "is a PNG image"),
    "sheet.csv": (b"PK\x03\x04rest", "is a zip archive"),
    "columns.csv": (b"PAR1rest", "is a Parquet file"),
    "picture.csv.gz": (gzip.compress(PNG), "is a PNG image"),
    "empty.csv": (b"", "is empty"),
    "empty.csv.gz": (gzip.compress(b""), "is empty"),
    "nothing.csv.gz": (b"", "is empty"),
    "latin.csv": (b"a,b\n1,2\nn\xe4he,3\n", "row 3: not UTF-8"),
    "binary.csv": (b"a,b\n\0\0,2\n", "row 2: a zero byte"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_what_its_name_says(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_text(tmp_path / name)
    first, hint = str(caught.value).split("\n")
    assert message in first and str(tmp_path / name) in first and hint.startswith("HINT: ")


def test_plain_gzipped_and_marked_text_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x,y\n")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbfx,y\n")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"x,y\n"))
    assert {read_text(path) for path in tmp_path.iterdir()} == {"x,y\n"}


def test_a_missing_file_and_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.csv"):
        read_bytes(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="no file"):
        read_bytes(tmp_path)


def test_find_file_takes_the_plain_name_or_the_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a.data.gz").write_bytes(PACKED)
    assert find_file(tmp_path, "a.data", "fetch it").name == "a.data.gz"
    with pytest.raises(ValueError, match=r"b\.data.*\nHINT: fetch it"):
        find_file(tmp_path, "b.data", "fetch it")


def test_the_root_is_the_option_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIPDP_DATA", str(tmp_path))
    assert data_root(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(str(tmp_path / "other")) == tmp_path / "other"
    with pytest.raises(ValueError, match=r"does not exist\nHINT"):
        data_root(str(tmp_path / "absent"))
    monkeypatch.delenv("LIPDP_DATA")
    with pytest.raises(ValueError, match=r"no data folder.*\nHINT: .*LIPDP_DATA"):
        data_root(None)
