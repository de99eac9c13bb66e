"""Holds out rows, chosen record by record.

Disjoint data composes in parallel only if the side that a record falls on depends on that record alone. A split by row
position, or by a shuffled permutation, deals out the other records again when one is removed, and the training rows of
two neighbouring data sets then differ in many records. The default split therefore hashes a record's features with a
public salt: neither another record nor the order of the rows moves a record.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.found_files import refusal

Split = Callable[[Tensor, Tensor], Tensor]


def hashed_split(x: Tensor, fraction: float, salt: str = "lipdp") -> Tensor:
    """Returns a boolean mask of the held-out rows: about `fraction` of all distinct feature rows, always the same ones.

    The label is left out of the hash, so that copies of one row never lie on both sides.
    """
    threshold = int(fraction * 2.0**64)
    key = salt.encode()[:64]
    rows = x.reshape(len(x), -1).contiguous().numpy().view(np.uint8)

    def held_out(row: np.ndarray) -> bool:
        return int.from_bytes(blake2b(row.tobytes(), digest_size=8, key=key).digest(), "big") < threshold

    return torch.tensor([held_out(row) for row in rows], dtype=torch.bool)


def checked_split(x: Tensor, y: Tensor, split: Split) -> Tensor:
    """Returns the mask of a caller's `split(x, y)`, which is refused if removing a record moves any other.

    Two removals are tried, the first row and the last: every split by position or by a permutation of the row count
    fails one of them. It catches honest mistakes and proves nothing about a hostile function.
    """
    mask = split(x, y)
    if mask.dtype != torch.bool or mask.shape != (len(x),):
        raise refusal(
            f"the split returned {mask.dtype} of shape {tuple(mask.shape)}, not one bool per row",
            "return a boolean tensor of length len(x), True for a held-out row",
        )
    keeps = torch.equal(split(x[1:], y[1:]), mask[1:]) and torch.equal(split(x[:-1], y[:-1]), mask[:-1])
    if not keeps:
        raise refusal(
            "the split moves other records when one is removed, so one record changes many training rows",
            "decide from the record itself, by a hash of its content or identifier, not from its row number",
        )
    return mask
