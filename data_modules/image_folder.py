"""Reads images in a folder per class, or in a zip of such a folder."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import torch

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.found_files import kind_of, refusal, refused_zip
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split

PARTS = ("train", "test")
_CHANNELS = {"L": 1, "RGB": 3}


class ImageFolder(PrivateDataModule):
    """Images in `<path>/<class>/<image>`, or in `<path>/train/<class>/<image>` with `test` beside it; or in a zip of
    either.

    Images are kept as bytes and become [-1, 1] by public constants. Classes, size and number are declared: a folder
    that is not a declared class is an error, and so is a file that is not an image. Hidden files are skipped.

    Args:
        path: the folder, or the .zip.
        classes: names of the class folders, in the order of the labels.
        declared_size: the declared number of training images.
        size: height and width of every image.
        mode: RGB or L (grey); images of another mode are converted, each by itself.
        resize: whether to scale images of another size, each by itself; otherwise they are refused.
    """

    task = "classification"
    scale = 2 / 255
    offset = -1.0
    heldout_share = 0.2

    def __init__(
        self,
        path: str,
        classes: Sequence[str],
        declared_size: int,
        size: Sequence[int],
        mode: Literal["RGB", "L"] = "RGB",
        resize: bool = False,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        if len(size) != 2 or min(size) < 1 or len(set(classes)) != len(classes) or len(classes) < 2:
            raise refusal(
                f"size is {list(size)} and classes are {list(classes)}",
                "give size: [height, width], and at least two distinct class names",
            )
        self.path, self.classes = Path(path), tuple(map(str, classes))
        self.declared_size, self.num_classes, self.class_names = declared_size, len(classes), self.classes
        self.mode, self.resize = mode, resize
        self.input_shape = (_CHANNELS[mode], size[0], size[1])
        self.input_bound = box_norm(self.input_shape, -1.0, 1.0)

    def where(self, part: str) -> str:
        return f"{self.path}, {part} images"

    def load_train(self) -> Rows:
        parts = self._parts()
        rows = self._read("train" if "train" in parts else "")
        assert rows is not None
        return rows

    def load_test(self) -> Rows | None:
        return self._read("test") if "test" in self._parts() else None

    def declarations(self) -> list[str]:
        return [f"classes {', '.join(self.classes)}; images of {self.mode} bytes, 0 to 255, by the file format"]

    def _parts(self) -> set[str]:
        return {name.parts[0] for name, _ in self._files()} & set(PARTS) - set(self.classes)

    def _read(self, part: str) -> Rows:
        images, labels = [], []
        for name, content in self._files():
            inside = name.parts
            if part and inside[0] != part:
                if inside[0] not in PARTS:
                    raise refusal(
                        f"{self.path}, {name}: neither below train nor below test",
                        "move it, or leave out train and test",
                    )
                continue
            folders = inside[1:] if part else inside
            if len(folders) != 2 or folders[0] not in self.classes:
                wrong = f"{folders[0]!r} is not one of the declared classes {', '.join(self.classes)}"
                if folders[0] in self.classes:
                    wrong = f"not directly in the folder {folders[0]!r}"
                raise refusal(
                    f"{self.path}, {name}: {wrong}", "use one folder per declared class, with images directly in it"
                )
            images.append(self._decode(name, content()))
            labels.append(self.classes.index(folders[0]))
        if not images:
            raise refusal(f"{self.path}: there are no {part or 'training'} images", "<class>/<image> below it")
        return torch.from_numpy(np.stack(images)), torch.tensor(labels, dtype=torch.int64)

    def _decode(self, name: PurePosixPath, content: bytes) -> np.ndarray:
        from PIL import Image

        channels, height, width = self.input_shape
        try:
            with Image.open(io.BytesIO(content)) as image:
                if image.size != (width, height) and not self.resize:
                    raise refusal(
                        f"{self.path}, {name}: {image.size[1]} x {image.size[0]} pixels, not {height} x {width}",
                        "declare the size, or set resize",
                    )
                converted = image.convert(self.mode)
                if converted.size != (width, height):
                    converted = converted.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(converted, dtype=np.uint8)
        except (
            OSError,
            SyntaxError,
            Image.DecompressionBombError,
        ):  # Pillow raises these for a file that is not an image
            found = kind_of(content[:64]) if content else "empty"
            reason = "a damaged image" if found and found.endswith("image") else found or "not an image"
            raise refusal(f"{self.path}, {name}: {reason}", "remove the file, or fetch it again") from None
        return pixels.reshape(height, width, channels).transpose(2, 0, 1)

    def _files(self) -> Iterator[tuple[PurePosixPath, Callable[[], bytes]]]:
        """Yields the name below the root and the content of every file, in the order of names."""
        if self.path.is_dir():
            for file in sorted(p for p in self.path.rglob("*") if p.is_file()):
                name = PurePosixPath(file.relative_to(self.path).as_posix())
                if not _hidden(name):
                    yield name, file.read_bytes
        elif self.path.is_file():
            yield from self._members()
        else:
            raise refusal(f"there is no folder or zip {self.path}", "check the path")

    def _members(self) -> Iterator[tuple[PurePosixPath, Callable[[], bytes]]]:
        if not zipfile.is_zipfile(self.path):
            raise refusal(f"{self.path} is {refused_zip(self.path)}", "give a folder of images, or a zip of one")
        with zipfile.ZipFile(self.path) as archive:
            names = sorted(m for m in archive.namelist() if not m.endswith("/") and not _hidden(PurePosixPath(m)))
            # a zip is often made with the folder itself as its only entry
            tops = {PurePosixPath(m).parts[0] for m in names}
            top = tops.pop() if len(tops) == 1 else None
            strip = top is not None and top not in (*PARTS, *self.classes)
            for member in names:
                path = PurePosixPath(member)
                yield PurePosixPath(*path.parts[1:]) if strip else path, partial(self._content, archive, member)

    def _content(self, archive: zipfile.ZipFile, member: str) -> bytes:
        try:
            return archive.read(member)
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError):
            raise refusal(f"{self.path}, member {member}: damaged or encrypted", "make the zip again") from None


def _hidden(name: PurePosixPath) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.parts)
