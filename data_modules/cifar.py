"""Reads CIFAR-10 from torchvision's folder of python batches or from a zip of losslessly coded images."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.downloads import fetched, how_to_get
from lipdp_lightning.data_modules.found_files import cache_root, data_root, read_bytes, refusal, refused_zip
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Arrays = tuple[np.ndarray, np.ndarray]


class _BatchUnpickler(pickle.Unpickler):
    """Builds arrays and nothing else, since a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.ndarray.__reduce__(np.empty(0))[0]
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}")


def read_python_batch(path: Path) -> Arrays:
    """Returns images (n, 3, 32, 32) and labels of one of the published python batches."""
    data = read_bytes(path)
    try:
        batch = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
        images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(batch[b"labels"], dtype=np.int64)
    except Exception as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refusal(f"{path} is not a CIFAR-10 python batch: {problem}", "fetch the archive again") from None
    if labels.shape != (len(images),):
        raise refusal(f"{path}: {len(images)} images and labels of shape {labels.shape}", "fetch the archive again")
    outside = (labels < 0) | (labels >= len(CLASSES))
    if outside.any():
        row = int(np.argmax(outside))
        raise refusal(f"{path}, row {row}: label {labels[row]} is not one of 0 to 9", "fetch the archive again")
    return images, labels


def _decode(archive: zipfile.ZipFile, part: str, path: Path) -> Arrays:
    from PIL import Image, UnidentifiedImageError

    found: dict[int, tuple[str, int]] = {}
    for member in archive.namelist():
        pieces = member.split("/")
        if len(pieces) == 3 and pieces[0] == part and pieces[2]:
            stem = pieces[2].rpartition(".")[0]
            if pieces[1] not in CLASSES or not stem.isdecimal():
                raise refusal(f"{path}, member {member}: not <class>/<index>.<ending>", "give the zip of images")
            found[int(stem)] = (member, CLASSES.index(pieces[1]))
    if not found:
        raise refusal(f"{path} has no images {part}/<class>/<index>.<ending>", "give the zip of images")
    images = np.empty((len(found), 3, 32, 32), dtype=np.uint8)
    labels = np.empty(len(found), dtype=np.int64)
    for row, (_, (member, label)) in enumerate(sorted(found.items())):
        try:
            with Image.open(io.BytesIO(archive.read(member))) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError, zipfile.BadZipFile):
            raise refusal(f"{path}, member {member}: not a readable image", "fetch the zip again") from None
        if pixels.shape != (32, 32, 3):
            raise refusal(f"{path}, member {member}: {pixels.shape[:2]} pixels, not 32 x 32", "give CIFAR-10")
        images[row], labels[row] = pixels.transpose(2, 0, 1), label
    return images, labels


def _write_whole(target: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes beside the target, then renames, so that a reader finds the whole file or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_image_zip(path: Path, part: str) -> Arrays:
    """Returns `train` or `test` of the zip; both are decoded once and kept under `cache_root()`.

    The cache's name holds a digest of the archive's directory (member names and checksums), so that another archive
    never meets a stale cache. A cache file that cannot be read is written again.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            directory = repr([(member.filename, member.CRC) for member in archive.infolist()])
            digest = hashlib.sha256(directory.encode()).hexdigest()[:16]
            cached = cache_root() / f"cifar10-{digest}.npz"
            try:
                with np.load(cached, allow_pickle=False) as kept:
                    return kept[f"{part}_x"], kept[f"{part}_y"]
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                decoded = {name: _decode(archive, name, path) for name in ("train", "test")}
    except zipfile.BadZipFile:
        raise refusal(f"{path} is named .zip and is {refused_zip(path)}", "fetch it again") from None
    flat = {f"{name}_{kind}": decoded[name][i] for name in decoded for i, kind in enumerate("xy")}
    try:
        _write_whole(cached, flat)
    except OSError as error:
        raise refusal(
            f"the cache {cached} cannot be written: {error.strerror}", "set LIPDP_CACHE to a folder"
        ) from None
    return decoded[part]


class CIFAR10(PrivateDataModule):
    """50000 colour images of ten classes, kept as bytes; pixels become [-1, 1] by public constants.

    It looks under `root` for `cifar-10-batches-py/` (torchvision's) and then for `cifar-10/cifar10_images.zip`, whose
    members are `train|test/<class>/<index>.<ending>`. The published test images are the validation rows when
    `validation_fraction` is 0: do not select on them.

    Args:
        root: the data folder; LIPDP_DATA by default.
        download: whether to fetch the python batches if neither form is there.
    """

    input_shape = (3, 32, 32)
    task = "classification"
    num_classes = 10
    declared_size = 50_000
    scale = 2 / 255
    offset = -1.0
    input_bound = box_norm((3, 32, 32), -1.0, 1.0)

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        self.root, self.download = root, download

    def _root(self) -> Path:
        hint = f"{how_to_get('cifar-10-batches-py')} once there is a folder"
        return data_root(self.root, "cifar-10-batches-py/ or cifar-10/cifar10_images.zip", hint)

    def where(self, part: str) -> str:
        batches = self._root() / "cifar-10-batches-py"
        place = batches if batches.is_dir() else self._root() / "cifar-10" / "cifar10_images.zip"
        return f"{place}, {part} images"

    def _read(self, part: str) -> Rows:
        root = self._root()
        batches, images_zip = root / "cifar-10-batches-py", root / "cifar-10" / "cifar10_images.zip"
        if self.download and not batches.is_dir() and not images_zip.is_file():
            fetched(root, batches.name, "")
        if batches.is_dir():
            names = [f"data_batch_{i}" for i in range(1, 6)] if part == "train" else ["test_batch"]
            missing = [name for name in names if not (batches / name).is_file()]
            if missing:
                hint = f"remove the folder and {how_to_get(batches.name)}"
                raise refusal(f"there is no file {batches / missing[0]}", hint)
            parts = [read_python_batch(batches / name) for name in names]
            images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        elif images_zip.is_file():
            images, labels = read_image_zip(images_zip, part)
        else:
            raise refusal(
                f"there is no folder {batches} and no file {images_zip}",
                f"{how_to_get(batches.name)}; or set LIPDP_DATA to the root of torchvision.datasets.CIFAR10",
            )
        return torch.from_numpy(images), torch.from_numpy(labels)

    def load_train(self) -> Rows:
        return self._read("train")

    def load_test(self) -> Rows:
        return self._read("test")

    def declarations(self) -> list[str]:
        return ["pixels are bytes, 0 to 255, by the file format"]
