"""Public rows that a forecast is made from: made up within what is declared, or read from a file of public data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHARES = {"common": 0.5, "class": 0.15, "own": 0.35}
"""The energy of a made-up row: what all rows share, what rows of its class share, and what is its own."""

_SMOOTH_SIDE = 4  # images are made of this many random values per side, and smooth between them


@dataclass(frozen=True)
class PublicRows:
    """Holds rows that are public, and says where they come from."""

    x: Tensor
    y: Tensor
    source: str

    def __len__(self) -> int:
        return len(self.x)


def made_up_rows(
    shape: tuple[int, ...], task: str, outputs: int, bound: float, count: int, seed: int, vocabulary: int | None = None
) -> PublicRows:
    """Returns rows of a made-up task, drawn from declared numbers alone.

    A class has a prototype, all rows share one part and every row has a part of its own (``SHARES``). Images are
    smooth. Every row has the norm that is declared as the largest. Classes are balanced and in turn. In a row of
    tokens, each is that of its place in one of the three parts.

    Args:
        shape: the shape of one example.
        task: classification, binary or regression.
        outputs: the number of outputs of the network.
        bound: the declared bound on the norm of a row.
        count: the number of rows.
        seed: decides the draws.
        vocabulary: the declared number of tokens, if rows hold tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = outputs if task == "classification" else 2
    labels = torch.arange(count) % classes
    parts = {"common": (1, False), "class": (classes, True), "own": (count, False)}

    def rows_of(part: str, draw: Callable[[int], Tensor]) -> Tensor:
        number, by_class = parts[part]
        return draw(number)[labels] if by_class else draw(number).expand(count, *shape)

    if vocabulary is None:
        x = torch.zeros(count, *shape)
        for part in parts:
            x = x + rows_of(part, lambda n: _unit(_fields(n, shape, generator))) * math.sqrt(SHARES[part])
        x = _unit(x) * bound
    else:
        tokens = [rows_of(p, lambda n: torch.randint(1, vocabulary, (n, *shape), generator=generator)) for p in parts]
        chances = torch.tensor([SHARES[part] for part in parts]).expand(count, -1)
        chosen = torch.multinomial(chances, math.prod(shape), replacement=True, generator=generator)
        x = torch.stack(tokens).gather(0, chosen.reshape(1, count, *shape))[0].float()
    source = f"{count} made-up rows within the declared ranges"
    if task == "classification":
        return PublicRows(x, labels, source)
    if task == "binary":
        return PublicRows(x, labels.float(), source)
    return PublicRows(x, (2.0 * labels - 1.0).unsqueeze(1).expand(count, outputs).squeeze(1), source)


def _fields(number: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) != 3:
        return torch.randn(number, *shape, generator=generator)
    side = [min(_SMOOTH_SIDE, n) for n in shape[1:]]
    coarse = torch.randn(number, shape[0], *side, generator=generator)
    return F.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=False)


def _unit(x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp_min(1e-12)
    return x / size.reshape(-1, *(1,) * (x.dim() - 1))


def read_public_rows(path: str | Path, shape: tuple[int, ...], task: str, outputs: int) -> PublicRows:
    """Returns the rows of an .npz file with arrays ``x`` and ``y``, in the form in which the network receives them.

    Raises:
        ValueError: If the file does not hold such rows of the declared shape.
    """
    where = f"--public-inputs {path}"
    hint = f"HINT: numpy.savez(file, x=..., y=...) with x of shape (rows, {', '.join(map(str, shape))})"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in ("x", "y")}
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} cannot be read as arrays x and y: {str(error) or type(error).__name__}. {hint}."
        ) from error
    if arrays["x"].dtype.kind not in "fui" or arrays["y"].dtype.kind not in "fuib":
        raise ValueError(f"{where} holds values that are not numbers. {hint}.")
    x, y = torch.as_tensor(arrays["x"].astype("float32")), torch.as_tensor(arrays["y"].astype("float32"))
    problems = []
    if tuple(x.shape[1:]) != tuple(shape) or len(x) != len(y) or len(x) < 2:
        problems.append(f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, and at least two rows are needed")
    if not (x.isfinite().all() and y.isfinite().all()):
        problems.append("some values are not finite")
    if task == "classification" and y.numel() and not (y.min() >= 0 and y.max() < outputs and (y == y.round()).all()):
        problems.append(f"labels are not whole numbers from 0 to {outputs - 1}")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}. {hint}.")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # a file may be sorted by class
    return PublicRows(x[order], y[order].long() if task == "classification" else y[order], f"public rows of {path}")
