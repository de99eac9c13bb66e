"""Digests of tensors that are read where they lie: no change goes unseen, whatever the layout and the size."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lipdp_lightning.privacy import digests
from lipdp_lightning.privacy.digests import KeyedDigest

KEY = bytes(range(32))
# of a size that is hashed as it is, and of one that enters by its code
SIZES = [(3, 5), (70, 90)]
LAYOUTS: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "contiguous": lambda size: torch.randn(size),
    "transposed": lambda size: torch.randn(size[::-1]).t(),
    "every other column": lambda size: torch.randn(size[0], 2 * size[1])[:, ::2],
    "negated": lambda size: torch._neg_view(torch.randn(size)),
    "conjugated": lambda size: torch.randn(size, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_in_place_is_seen_in_every_layout(layout: str, size: tuple[int, int]) -> None:
    weight = LAYOUTS[layout](size)
    digest = KeyedDigest(KEY)
    seen = [digest.of({"w": weight}), digest.of({"w": weight})]
    assert seen[0] == seen[1]
    for change in (lambda: weight.mul_(2), lambda: weight[-1, -1].add_(2.0**-10), lambda: weight.data.add_(1)):
        change()
        seen.append(digest.of({"w": weight}))
    assert len(set(seen)) == 4
    assert seen[-1] == KeyedDigest(KEY).of({"w": weight.clone(memory_format=torch.contiguous_format)})


@pytest.mark.parametrize("entries", [1 << 13, (1 << 14) + 77])
def test_every_part_of_a_tensor_beyond_a_parts_size_counts(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors above 2^30 bytes enter in parts: here, of 2^14 bytes."""
    monkeypatch.setattr(digests, "_AUTHENTICATED", 1 << 14)
    values = torch.randn(entries)
    parts = -(-4 * entries // (1 << 14))
    assert parts >= 2
    digest = KeyedDigest(KEY)
    seen = [digest.of({"w": values})]
    for part in range(parts):
        values[min(entries - 1, part * 4096 + 4000)] += 1
        seen.append(digest.of({"w": values}))
    exchanged = torch.cat([values[4096:8192], values[:4096], values[8192:]])
    seen += [digest.of({"w": exchanged}), digest.of({"w": values[:-1]})]
    assert all(a != b for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("grad", [True, False])
def test_every_bit_of_a_state_of_several_dtypes_counts(grad: bool) -> None:
    """Short tensors are put together, those of one dtype, with large ones between them."""
    state = {
        "weight": torch.randn(3, 2, requires_grad=grad), "large": torch.randn(70, 90), "steps": torch.tensor([3, 4]),
        "bias": torch.randn(2), "mask": torch.tensor([True, False]), "half": torch.randn(4).bfloat16(),
        "wide": torch.randn(2, dtype=torch.float64), "also wide": torch.randn(1, dtype=torch.float64),
        "none": torch.zeros(0), "alone": torch.zeros(()),
    }  # fmt: skip
    digest = KeyedDigest(KEY)
    seen = [digest.of(state), digest.of({name: state[name] for name in reversed(state)})]
    for tensor in state.values():
        for entry in range(min(3, tensor.numel())):
            bits = tensor.detach().view(-1).view(torch.uint8)
            bits[entry * tensor.element_size()] ^= 1
            seen.append(digest.of(state))
    weight, bias = state["weight"], state["bias"]
    seen.append(digest.of(state | {"weight": weight.detach()[:2], "bias": torch.cat([weight.detach()[2], bias])}))
    assert len(set(seen)) == len(seen) == 3 + 3 + 3 + 2 + 2 + 2 + 3 + 2 + 1 + 1
