"""Images in folders and zips: rows, labels, declared classes, and files that are not what they seem."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lipdp_lightning.data_modules.image_folder import ImageFolder

CLASSES = ("cat", "dog")


def picture(value: int, size: tuple[int, int] = (4, 6), mode: str = "RGB") -> bytes:
    """A PNG of (height, width) whose red channel is the value."""
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[..., 0], pixels[0, 0, 1] = value, 255 - value
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


def files(prefix: str = "", count: int = 20) -> dict[str, bytes]:
    return {f"{prefix}{CLASSES[i % 2]}/{i:03d}.png": picture(10 * i) for i in range(count)}


def written(folder: Path, content: dict[str, bytes], packed: bool) -> Path:
    if packed:
        with zipfile.ZipFile(folder / "images.zip", "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
        return folder / "images.zip"
    for name, data in content.items():
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).write_bytes(data)
    return folder / "images"


def module(path: Path, **options: Any) -> ImageFolder:
    defaults: dict[str, Any] = {"classes": CLASSES, "declared_size": 20, "size": (4, 6), "validation_fraction": 0.0}
    return ImageFolder(str(path), **(defaults | options))


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_pixels_and_labels_arrive_in_the_order_of_names(packed: bool, tmp_path: Path) -> None:
    data = module(written(tmp_path, files() | {".DS_Store": b"x", "__MACOSX/cat/0.png": b"x"}, packed))
    data.setup()
    assert data._train is not None and data._train.x.shape == (20, 3, 4, 6)
    assert data._train.y.tolist() == [0] * 10 + [1] * 10
    assert data._train.x[:, 0, 1, 1].tolist() == [10 * i for i in (*range(0, 20, 2), *range(1, 20, 2))]
    assert data._train.x[0, 1, 0, 0] == 255
    values = data.transform_batch(data._train.x)
    assert float(values.flatten(1).norm(dim=1).max()) <= data.input_bound and float(values.min()) == -1.0


def test_folder_zip_and_a_zip_with_the_folder_in_it_agree(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = [written(tmp_path, files(), False), written(tmp_path, files(), True)]
    paths.append(written(tmp_path / "inner", files("photos/"), True))
    modules = [module(path) for path in paths]
    assert len({m.fingerprint() for m in modules}) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_train_and_test_folders(packed: bool, tmp_path: Path) -> None:
    data = module(written(tmp_path, files("train/") | files("test/", 6), packed))
    data.setup()
    assert data.rows == 20 and len(data._test) == 6  # type: ignore[arg-type]


def test_grey_and_resized_images(tmp_path: Path) -> None:
    path = written(tmp_path, files() | {"cat/000.png": picture(0, (8, 12))}, False)
    with pytest.raises(ValueError, match=r"cat/000\.png: 8 x 12 pixels, not 4 x 6\nHINT"):
        module(path).setup()
    data = module(path, mode="L", resize=True)
    data.setup()
    assert data._train is not None and data._train.x.shape == (20, 1, 4, 6) and data.input_shape == (1, 4, 6)


BAD_FILES = {
    "cat/000.png": (b"hello", r"cat/000\.png: not an image"),
    "cat/002.png": (picture(3)[:60], r"cat/002\.png: a damaged image"),
    "dog/001.png": (b"", r"dog/001\.png: empty"),
    "dog/003.png": (b"<html>not found</html>", r"dog/003\.png: an HTML page"),
    "bird/000.png": (picture(3), r"bird/000\.png: 'bird' is not one of the declared classes cat, dog"),
    "cat/more/000.png": (picture(3), r"cat/more/000\.png: not directly in the folder 'cat'"),
    "000.png": (picture(3), r"000\.png: '000\.png' is not"),
    "cat/labels.csv": (b"a,b\n", r"cat/labels\.csv: not an image"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_image_of_a_declared_class_is_named(name: str, packed: bool, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = written(tmp_path, files() | {name: content}, packed)
    with pytest.raises(ValueError, match=rf"^{path}, {message}[^\n]*\nHINT"):
        module(path).setup()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"<!doctype html>", "is an HTML page"),
        (b"Rar!", "is not a zip archive"),
        (b"", "is empty"),
        (b"PK\x03\x04 and", "is a zip archive that was cut off or damaged"),
    ],
)
def test_a_zip_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(content)
    with pytest.raises(ValueError, match=rf"images\.zip {message}\nHINT"):
        module(tmp_path / "images.zip").setup()
    with pytest.raises(ValueError, match="there is no folder or zip"):
        module(tmp_path / "elsewhere").setup()


def test_a_zip_with_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, files(), True)
    data = bytearray(path.read_bytes())
    data[data.index(b"IDAT") + 8] ^= 255
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"member cat/000\.png: damaged or encrypted\nHINT"):
        module(path).setup()


@pytest.mark.parametrize("options", [{"size": (4,)}, {"classes": ("cat",)}, {"classes": ("cat", "cat")}])
def test_impossible_declarations_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size is .* and classes are .*\nHINT"):
        module(tmp_path, **options)


def test_labels_are_the_declared_order_and_not_the_order_of_folders(tmp_path: Path) -> None:
    data = module(written(tmp_path, files(), False), classes=("dog", "cat"))
    data.setup()
    assert data._train is not None and torch.equal(data._train.y, torch.tensor([1] * 10 + [0] * 10))
