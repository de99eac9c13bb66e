"""Which values a checkpoint may hold: those that can be read back without running code that the file names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# exact types: a subclass would be rebuilt by its own code
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, nn.Parameter, torch.Size, torch.dtype,
    torch.device,
)  # fmt: skip
_LISTS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)


def strangers(value: Any, name: str = "") -> Iterator[str]:
    """Where in nested containers a value is not plain, and of which class it is."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            yield from strangers(key, f"a key of {name or 'it'}")
            yield from strangers(item, f"{name}.{_short(key)}" if name else _short(key))
    elif kind in _LISTS:
        for index, item in enumerate(value):
            yield from strangers(item, f"{name}.{index}")
    elif kind not in _LEAVES:
        yield f"{name} is a {kind.__module__}.{kind.__qualname__}"


def check_plain(content: dict[str, Any]) -> None:
    """Refuse what could only be read back by running code; every place is named."""
    found = list(strangers(content))
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ValueError(
            f"the checkpoint cannot be written: {'; '.join(found[:5])}{more}. Reading such values back runs code that "
            "the file names, so checkpoints hold numbers, strings, tensors, and lists and dictionaries of them. "
            "HINT: convert the values in the state_dict() of that callback, optimizer or scheduler (a numpy number by "
            "float(), an array by torch.from_numpy), or leave them out of save_hyperparameters()."
        )


def _short(key: Any) -> str:
    return str(key)[:80] if type(key) in (str, int) else type(key).__name__
