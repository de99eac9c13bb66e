"""Arrays in an .npz file."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lipdp_lightning.data_modules.arrays import NpzArrays

X = np.random.default_rng(0).normal(size=(40, 2, 3))
Y = np.arange(40) % 3


def module(path: Path, **options: Any) -> NpzArrays:
    defaults: dict[str, Any] = {
        "declared_size": 40,
        "input_shape": (2, 3),
        "task": "classification",
        "low": -1.0,
        "high": 1.0,
        "num_classes": 3,
    }
    return NpzArrays(str(path), **{**defaults, **options})


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_floats_are_clipped_to_the_declared_bounds(tmp_path: Path) -> None:
    data = module(saved(tmp_path / "a.npz", x=X, y=Y, x_test=X[:5], y_test=Y[:5]))
    data.setup()
    assert data._train is not None and np.abs(X).max() > 1
    assert np.array_equal(data._train.x.numpy(), X.clip(-1, 1).astype(np.float32))
    assert data._train.y.tolist() == Y.tolist() and len(next(iter(data.test_dataloader()))[0]) == 5
    assert data.input_bound == pytest.approx(math.sqrt(6))


def test_bytes_are_kept_and_mapped_onto_the_declared_range(tmp_path: Path) -> None:
    pixels = np.tile(np.array([0, 255, 51], dtype=np.uint8), (40, 2, 1))
    data = module(saved(tmp_path / "a.npz", x=pixels, y=Y))
    data.setup()
    assert data._train is not None and data._train.x.dtype == torch.uint8
    values = data.transform_batch(data._train.x)[0, 0].tolist()
    assert values == pytest.approx([-1.0, 1.0, -0.6], abs=1e-6)


def test_regression_targets(tmp_path: Path) -> None:
    data = module(saved(tmp_path / "a.npz", x=X, y=Y), task="regression", num_classes=None, target_bound=2.0)
    data.setup()
    assert data._train is not None and data._train.y.dtype == torch.float32
    with pytest.raises(ValueError, match=r"row 2 has label 2\.0, not within"):
        module(tmp_path / "a.npz", task="regression", target_bound=1.5).setup()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_clip_does_not_hide_a_value_that_is_not_finite(tmp_path: Path, value: float) -> None:
    x = X.copy()
    x[7, 1, 2] = value
    with pytest.raises(ValueError, match=rf"row 7, column \(1, 2\) is {value}.*\nHINT"):
        module(saved(tmp_path / "a.npz", x=x, y=Y)).setup()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no_y": ({"x": X}, r"a\.npz has an array x and no y"),
    "neither": ({"a": X}, "no arrays x and y"),
    "half of a test set": ({"x": X, "y": Y, "y_test": Y}, "an array y_test and no x_test"),
    "text": ({"x": X, "y": np.array(["a"] * 40)}, "arrays of numbers"),
    "scalar": ({"x": X, "y": np.array(1)}, "arrays of numbers"),
    "shape": ({"x": X[:, 0], "y": Y}, "input_shape declares"),
    "label": ({"x": X, "y": Y + 1}, "label 3, not one of the 3"),
    "objects": ({"x": np.array([{}] * 40, dtype=object), "y": Y}, "cannot be read"),
    "fractional": ({"x": X, "y": Y + 0.5}, "labels are torch.float32"),
    "size": ({"x": X[:30], "y": Y[:30]}, "40 rows are declared and fewer exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays(case: str, tmp_path: Path) -> None:
    arrays, message = BAD[case]
    with pytest.raises(ValueError, match=rf"{message}.*\nHINT"):
        module(saved(tmp_path / "a.npz", **arrays)).setup()


def test_bad_files_and_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.npz"):
        module(tmp_path / "none.npz").setup()
    (tmp_path / "p.npz").write_bytes(b"\x89PNG....")
    with pytest.raises(ValueError, match=r"p\.npz is a PNG image"):
        module(tmp_path / "p.npz").setup()
    whole = saved(tmp_path / "cut.npz", x=X, y=Y).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.npz is a zip archive that was cut off or damaged\nHINT"):
        module(tmp_path / "cut.npz").setup()
    with zipfile.ZipFile(tmp_path / "texts.npz", "w") as archive:
        for name in "xy":
            archive.writestr(f"{name}.npy", "1,2")
    with pytest.raises(ValueError, match=r"texts\.npz: x and y must be arrays\nHINT"):
        module(tmp_path / "texts.npz").setup()
    damaged = bytearray(whole)
    damaged[400] ^= 0xFF
    (tmp_path / "bit.npz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"bit\.npz cannot be read"):
        module(tmp_path / "bit.npz").setup()
    with pytest.raises(ValueError, match="not a finite range"):
        module(tmp_path / "a.npz", low=1.0, high=1.0)
