"""Digests of tensors that do not lie on the CPU: lipdp_lightning/privacy/digests.py::KeyedDigest."""

from __future__ import annotations

import itertools

import pytest
import torch
from pretend import pretended_gpu, to_gpu
from torch import Tensor

from lipdp_lightning.kernels.multilinear import key_table, multilinear_hash
from lipdp_lightning.privacy.digests import KeyedDigest

KEY = bytes(range(32))


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {"a": torch.randn(70, 90, generator=generator), "b": torch.randn(5000, generator=generator)}
    return made | {"half": made["b"].half(), "brain": made["b"].bfloat16()[:7], "double": made["b"].double()}


def test_the_hash_is_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own, table = list(tensors().values()), key_table(KEY)
    expected = multilinear_hash(own, table)
    with pretended_gpu(monkeypatch):
        moved = [to_gpu(tensor.t().contiguous()).t() if tensor.dim() == 2 else to_gpu(tensor) for tensor in own]
        found = multilinear_hash(moved, to_gpu(table)).cpu()
    assert torch.equal(found, expected)


def test_a_digest_brings_32_bytes_to_the_host_and_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch) as counts:
        moved, digest = {name: to_gpu(tensor) for name, tensor in tensors().items()}, KeyedDigest(KEY)
        first = digest.of(moved)  # which also brings the key to the device
        counts.clear()
        assert digest.of(moved) == first
        assert (counts.to_host, counts.to_device, counts.waits) == (32, 0, 1)
        assert counts.launches <= 6  # two levels of gathering, filling up and summing


def test_every_change_is_seen_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        digest, seen = KeyedDigest(KEY), []
        for name in tensors():
            moved = {n: to_gpu(tensor) for n, tensor in tensors().items()}
            seen.append(digest.of(moved)) if name == "a" else None
            bits = moved[name].inner.view(-1).view(torch.uint8)
            bits[-1] ^= 1  # the storage is written to, and no version changes
            seen.append(digest.of(moved))
        own = {name: to_gpu(tensor) for name, tensor in tensors().items()}
        seen.append(digest.of({"b": own["a"], "a": own["b"]}))
        seen.append(digest.of({"a": own["a"].view(90, 70), "b": own["b"]}))
        seen.append(digest.of({"a": own["a"], "b": own["b"]}))
        seen.append(digest.of({"a": own["a"], "b": own["b"].cpu()}))  # part of it on the host
        seen.append(digest.of({"a": own["a"].cpu(), "b": own["b"]}))
        seen.append(KeyedDigest(bytes(32)).of({"a": own["a"], "b": own["b"]}))
    assert all(a != b for a, b in itertools.combinations(seen, 2))
