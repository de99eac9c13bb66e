"""CIFAR-10 from python batches and from a zip of images, on small generated files and on the real zip."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lipdp_lightning.data_modules.cifar as cifar
from lipdp_lightning.data_modules.cifar import CIFAR10, CLASSES

needs_data = pytest.mark.skipif(not os.environ.get("LIPDP_DATA"), reason="LIPDP_DATA is not set")
PIXELS = np.random.default_rng(0).integers(0, 256, (25, 32, 32, 3), dtype=np.uint8)


class Small(CIFAR10):
    declared_size = 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIPDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_zip(root: Path, extra: dict[str, bytes] | None = None) -> Path:
    path = root / "cifar-10" / "cifar10_images.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for index in reversed(range(25)):  # out of order, as in the real archive
            part, number = ("train", index) if index < 20 else ("test", index - 20)
            buffer = io.BytesIO()
            Image.fromarray(PIXELS[index]).save(buffer, "PNG")
            archive.writestr(f"{part}/{CLASSES[index % 10]}/{number:05d}.png", buffer.getvalue())
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return path


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes all strings as Python 2 did: the published batches come from there."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]  # noqa: RUF012

    def save_string(self, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


def python2_pickle(content: object) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def write_batches(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    flat = PIXELS.transpose(0, 3, 1, 2).reshape(25, -1)
    for i in range(6):
        name = f"data_batch_{i + 1}" if i < 5 else "test_batch"
        rows = slice(4 * i, 4 * i + 4) if i < 5 else slice(20, 25)
        labels = [row % 10 for row in range(25)][rows]
        content = {b"data": flat[rows], b"labels": labels, b"batch_label": b"batch"}
        (folder / name).write_bytes(python2_pickle(content))
    return folder


@pytest.mark.parametrize("layout", [write_zip, write_batches])
def test_both_layouts_give_the_same_rows(layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    layout(tmp_path)
    module = Small(root=str(tmp_path))
    module.setup()
    assert module._train is not None and module._test is not None
    assert np.array_equal(module._train.x.numpy(), PIXELS[:20].transpose(0, 3, 1, 2))
    assert module._train.y.tolist() == [row % 10 for row in range(20)]
    assert np.array_equal(module._test.x.numpy(), PIXELS[20:].transpose(0, 3, 1, 2))
    x = module.transform_batch(module._train.x)
    assert x.min() >= -1 and x.max() <= 1 + 1e-6 and x.min() < -0.9 and x.max() > 0.9


def test_decoded_images_are_cached_outside_the_root_and_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    write_zip(root)
    before = sorted(root.rglob("*"))
    first = Small(root=str(root)).fingerprint()
    assert sorted(root.rglob("*")) == before
    (kept,) = cache.iterdir()

    def refuse_to_decode(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(cifar, "_decode", refuse_to_decode)
    assert Small(root=str(root)).fingerprint() == first
    kept.unlink()
    with pytest.raises(AssertionError, match="decoded again"):
        Small(root=str(root)).setup()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 half a file"])
def test_a_damaged_cache_is_written_anew(tmp_path: Path, cache: Path, damage: bytes) -> None:
    write_zip(tmp_path)
    first = Small(root=str(tmp_path)).fingerprint()
    (kept,) = cache.iterdir()
    kept.write_bytes(damage)
    assert Small(root=str(tmp_path)).fingerprint() == first
    with np.load(kept) as again:
        assert again["train_x"].shape == (20, 3, 32, 32)


def test_another_archive_never_meets_a_stale_cache(tmp_path: Path, cache: Path) -> None:
    path = write_zip(tmp_path)
    first = Small(root=str(tmp_path)).fingerprint()
    flipped = io.BytesIO()
    Image.fromarray(255 - PIXELS[0]).save(flipped, "PNG")
    members = {}
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["train/airplane/00000.png"] = flipped.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert Small(root=str(tmp_path)).fingerprint() != first
    assert len(list(cache.iterdir())) == 2


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zip(tmp_path)

    def interrupted(file: io.BufferedWriter, **_: np.ndarray) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar.np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Small(root=str(tmp_path)).setup()
    assert list(cache.iterdir()) == []


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["LIPDP_PAYLOAD"],)


def test_a_pickle_that_asks_for_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIPDP_PAYLOAD", str(tmp_path / "ran"))
    content = pickle.dumps({b"data": Payload(), b"labels": []})
    folder = write_batches(tmp_path)
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_3 is not a CIFAR-10 python batch: .*mkdir.*\nHINT"):
        Small(root=str(tmp_path)).setup()
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists(), "the payload was not one"


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps([1]), pickle.dumps({b"data": [[1]], b"labels": [0]})])
def test_a_bad_python_batch_is_named(tmp_path: Path, content: bytes) -> None:
    (write_batches(tmp_path) / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_2 is not a CIFAR-10 python batch.*\nHINT"):
        Small(root=str(tmp_path)).setup()


def png(size: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "member, data, message",
    [
        ("train/zebra/00020.png", png(32), "not <class>/<index>"),
        ("train/cat/first.png", png(32), "not <class>/<index>"),
        ("train/cat/00020.png", png(31), r"\(31, 31\) pixels"),
        ("train/cat/00020.png", b"text", "not a readable image"),
    ],
)
def test_a_bad_member_of_the_zip_is_named_and_nothing_is_cached(
    tmp_path: Path, cache: Path, member: str, data: bytes, message: str
) -> None:
    write_zip(tmp_path, {member: data})
    with pytest.raises(ValueError, match=rf"member {member}.*{message}.*\nHINT"):
        Small(root=str(tmp_path)).setup()
    assert not cache.exists()


def test_a_zip_that_is_none_and_no_data_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar-10-batches-py.*\nHINT: .*torchvision"):
        Small(root=str(tmp_path)).setup()
    write_zip(tmp_path).write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"named \.zip and is not a zip archive\nHINT"):
        Small(root=str(tmp_path)).setup()


@needs_data
@pytest.mark.slow
def test_the_real_images() -> None:
    module = CIFAR10()
    module.setup()
    assert module._train is not None and module._test is not None
    assert module._train.y.bincount().tolist() == [5000] * 10 and module._test.y.bincount().tolist() == [1000] * 10
    means = module._train.x.to(torch.float32).mean(dim=(0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
