"""Defines small public data sets that ship with scikit-learn; they need no files and serve examples and tests.

The range of every feature is a pair of round numbers written here that covers the physical range in the documentation;
it is not computed from the data. (scikit-learn's own scaled version of the diabetes data is centred with the data's
means, so the raw one is used.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.schema import scale_declared

Ranges = dict[str, tuple[float, float]]


class Digits(PrivateDataModule):
    """1797 handwritten digits, 8 x 8 pixels of 0 to 16, kept as bytes and scaled by 1/16."""

    input_shape = (1, 8, 8)
    task = "classification"
    num_classes = 10
    declared_size = 1797
    scale = 1 / 16
    input_bound = box_norm((1, 8, 8), 0.0, 1.0)
    heldout_share = 0.2

    def load_train(self) -> Rows:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
        return images, torch.from_numpy(digits.target.astype(np.int64))

    def declarations(self) -> list[str]:
        return ["pixels are counts of 0 to 16, by the file format"]


class EmbeddedTable(PrivateDataModule):
    """A numeric table whose features are clipped to the declared ranges and mapped onto [-1, 1]."""

    ranges: ClassVar[Ranges]
    target_range: tuple[float, float] | None = None
    heldout_share = 0.2

    def load(self) -> Any:
        """Returns scikit-learn's bunch of `data`, `target` and `feature_names`."""
        raise NotImplementedError

    def load_train(self) -> Rows:
        bunch = self.load()
        if list(map(str, bunch.feature_names)) != list(self.ranges):
            raise refusal(
                f"{type(self).__name__}: this scikit-learn names the features {list(bunch.feature_names)}",
                "the declared ranges are for other columns: update them",
            )
        low, high = np.array(list(self.ranges.values())).T
        x = scale_declared(np.asarray(bunch.data, dtype=np.float64), low, high, "symmetric")
        if self.target_range is None:
            y = np.asarray(bunch.target, dtype=np.int64)
        else:
            y = scale_declared(np.asarray(bunch.target, dtype=np.float64), *self.target_range, "symmetric")
            y = y.astype(np.float32)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)

    def declarations(self) -> list[str]:
        lines = ["; ".join(f"{name} in [{low:g}, {high:g}]" for name, (low, high) in self.ranges.items())]
        if self.target_range is not None:
            lines.append(f"target in [{self.target_range[0]:g}, {self.target_range[1]:g}], mapped onto [-1, 1]")
        return lines


def _loader(name: str, **options: Any) -> Callable[[Any], Any]:
    def load(self: Any) -> Any:
        import sklearn.datasets

        return getattr(sklearn.datasets, name)(**options)

    return load


def _cells() -> Ranges:
    """Returns ranges of the ten measures of a cell nucleus: its mean, the error of the mean, and the worst value."""
    measures = {
        "radius": (40, 4, 40),
        "texture": (60, 6, 60),
        "perimeter": (260, 30, 260),
        "area": (5000, 600, 5000),
        "smoothness": (0.25, 0.05, 0.25),
        "compactness": (0.5, 0.2, 1.5),
        "concavity": (0.5, 0.4, 1.5),
        "concave points": (0.3, 0.1, 0.3),
        "symmetry": (0.4, 0.1, 0.8),
        "fractal dimension": (0.1, 0.05, 0.25),
    }
    kinds = ("mean {}", "{} error", "worst {}")
    return {
        kind.format(measure): (0.0, float(highs[index]))
        for index, kind in enumerate(kinds)
        for measure, highs in measures.items()
    }


CELL_RANGES = _cells()


class EmbeddedBreastCancer(EmbeddedTable):
    """569 cell samples: 0 malignant, 1 benign."""

    input_shape = (30,)
    task = "binary"
    num_classes = 2
    declared_size = 569
    ranges = CELL_RANGES
    input_bound = math.sqrt(30)
    load = _loader("load_breast_cancer")


class EmbeddedWine(EmbeddedTable):
    """178 wines of three cultivars."""

    input_shape = (13,)
    task = "classification"
    num_classes = 3
    declared_size = 178
    input_bound = math.sqrt(13)
    load = _loader("load_wine")
    ranges: ClassVar[Ranges] = {
        "alcohol": (10, 16),
        "malic_acid": (0, 6),
        "ash": (1, 4),
        "alcalinity_of_ash": (10, 30),
        "magnesium": (60, 180),
        "total_phenols": (0, 5),
        "flavanoids": (0, 6),
        "nonflavanoid_phenols": (0, 1),
        "proanthocyanins": (0, 4),
        "color_intensity": (0, 15),
        "hue": (0, 2),
        "od280/od315_of_diluted_wines": (1, 5),
        "proline": (200, 2000),
    }


class EmbeddedDiabetes(EmbeddedTable):
    """442 patients and a measure of disease progression one year on."""

    input_shape = (10,)
    task = "regression"
    target_bound = 1.0
    target_range = (0.0, 400.0)
    declared_size = 442
    input_bound = math.sqrt(10)
    load = _loader("load_diabetes", scaled=False)
    ranges: ClassVar[Ranges] = {
        "age": (18, 90),
        "sex": (1, 2),
        "bmi": (15, 50),
        "bp": (50, 150),
        "s1": (50, 350),
        "s2": (20, 300),
        "s3": (10, 120),
        "s4": (1, 12),
        "s5": (2, 7),
        "s6": (40, 200),
    }


class EmbeddedIris(EmbeddedTable):
    """150 flowers of three species; lengths in centimetres."""

    input_shape = (4,)
    task = "classification"
    num_classes = 3
    declared_size = 150
    input_bound = math.sqrt(4)
    load = _loader("load_iris")
    ranges: ClassVar[Ranges] = {
        "sepal length (cm)": (4, 8),
        "sepal width (cm)": (2, 5),
        "petal length (cm)": (0, 8),
        "petal width (cm)": (0, 3),
    }
