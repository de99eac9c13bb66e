"""Downloads from a local server: checked, whole or not at all, and only when asked."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lipdp_lightning.data_modules import Nursery
from lipdp_lightning.data_modules.downloads import SOURCES, Source, fetched

ROW = b"usual,proper,complete,1,convenient,convenient,nonprob,recommended,recommend\n"
PLACE = "tabular/nursery/nursery.data"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def publish(site: tuple[Path, str], file: bytes, promised: bytes | None = None, **options: object) -> Source:
    (site[0] / "file").write_bytes(file)
    digest = hashlib.sha256(file if promised is None else promised).hexdigest()
    return Source(f"{site[1]}/file", digest, **options)  # type: ignore[arg-type]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_missing_file_is_fetched_when_asked_and_used_from_then_on(
    site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nursery, "declared_size", 40)
    monkeypatch.setattr(Nursery, "heldout_share", 0.0)
    monkeypatch.setitem(SOURCES, PLACE, publish(site, ROW * 40))
    with pytest.raises(ValueError, match=r"there is no file .*nursery\.data.*\nHINT: .*download: true fetches it"):
        Nursery(root=str(root)).setup()
    assert files(root) == []
    Nursery(root=str(root), download=True).setup()
    assert files(root) == ["nursery.data"]
    (site[0] / "file").unlink()
    Nursery(root=str(root), download=True).setup()
    Nursery(root=str(root)).setup()


def test_another_content_is_refused_and_leaves_nothing(
    site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, PLACE, publish(site, b"<html>log in first</html>", promised=ROW * 40))
    with pytest.raises(ValueError, match=r"sent has the SHA-256 [0-9a-f]{64}, and [0-9a-f]{64} is expected\nHINT"):
        fetched(root, PLACE, "")
    assert files(root) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_there_is_checked_and_kept(
    packed: bool, site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, PLACE, publish(site, ROW * 40))
    path = root / f"{PLACE}{'.gz' if packed else ''}"
    path.parent.mkdir(parents=True)
    for content, good in ((ROW * 40, True), (ROW * 39, False)):
        path.write_bytes(gzip.compress(content) if packed else content)
        if good:
            assert fetched(root, PLACE, "") == path
        else:
            with pytest.raises(ValueError, match=rf"{path} has the SHA-256"):
                fetched(root, PLACE, "")
    assert path.exists()


@pytest.mark.parametrize("problem", ["no such file", "nobody answers", "not http"])
def test_an_unreachable_source_names_the_file_and_the_way_to_get_it(
    problem: str, site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {"no such file": f"{site[1]}/other", "nobody answers": "http://127.0.0.1:9/x", "not http": "file:///etc/x"}
    monkeypatch.setitem(SOURCES, PLACE, Source(urls[problem], "0" * 64))
    with pytest.raises(ValueError) as caught:
        fetched(root, PLACE, "")
    first, hint = str(caught.value).split("\n")
    assert hint.startswith("HINT: ") and (problem == "not http" or f"{root / PLACE} is missing" in first)
    assert files(root) == []


def test_listed_members_of_an_archive_are_unpacked_and_no_others(
    site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name in ("folder/a", "folder/b", "../evil"):
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    source = publish(site, content.getvalue(), members=(("folder/a", "batches/a"),))
    monkeypatch.setitem(SOURCES, "batches", source)
    fetched(root, "batches", "")
    assert files(root.parent / "data") == ["a"] and (root / "batches" / "a").read_bytes() == b"folder/a"
    assert not (root.parent / "evil").exists()


def test_a_member_of_a_zip_is_unpacked_and_its_content_checked_from_then_on(
    site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("data.csv", "a,b\n")
        archive.writestr("../evil", "x")
    digest = hashlib.sha256(b"a,b\n").hexdigest()
    source = publish(site, content.getvalue(), members=(("data.csv", "table.csv"),), content=digest)
    monkeypatch.setitem(SOURCES, "tables/table.csv", source)
    path = fetched(root, "tables/table.csv", "")
    assert path.read_text() == "a,b\n" and files(root) == ["table.csv"]
    assert fetched(root, "tables/table.csv", "") == path
    path.write_text("a;b\n")
    with pytest.raises(ValueError, match=rf"table\.csv has the SHA-256 .*{digest} is expected\nHINT"):
        fetched(root, "tables/table.csv", "")


@pytest.mark.parametrize("kind", ["zip", "tar", "neither"])
def test_an_archive_without_the_listed_member_is_refused_and_leaves_nothing(
    kind: str, site: tuple[Path, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO(b"neither")
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("other.csv", "a,b\n")
    elif kind == "tar":
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("other.csv"))
    source = publish(site, content.getvalue(), members=(("data.csv", "data.csv"),))
    monkeypatch.setitem(SOURCES, "data.csv", source)
    with pytest.raises(ValueError, match=r"cannot be unpacked: .*\nHINT: fetch it by hand"):
        fetched(root, "data.csv", "")
    assert files(root) == []


def test_a_table_without_a_known_checksum_says_where_it_is_published(root: Path) -> None:
    from lipdp_lightning.data_modules import DefaultCredit

    with pytest.raises(ValueError, match=r"no source with a known checksum\nHINT: .*UCI.*put the file there"):
        DefaultCredit(root=str(root), download=True).setup()


def test_every_source_has_an_address_and_a_full_checksum() -> None:
    for place, source in SOURCES.items():
        assert source.url.startswith(("https://", "http://fashion-mnist.")), place
        assert len(source.sha256) == 64 and int(source.sha256, 16) >= 0
