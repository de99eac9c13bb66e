"""The digits of scikit-learn, split once: 1,437 rows to train on and 360 to test on."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset


def digits(flat: bool = False) -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images.flatten(1) if flat else images, torch.tensor(data.target)


def split(x: Tensor, y: Tensor, train: int = 1437) -> tuple[TensorDataset, TensorDataset]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, rest = order[:train], order[train:]
    return TensorDataset(x[first], y[first]), TensorDataset(x[rest], y[rest])
