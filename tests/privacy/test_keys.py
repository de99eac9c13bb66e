"""Keys, streams and digests: lipdp_lightning/privacy/keys.py."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from lipdp_lightning.key_streams import CounterStream
from lipdp_lightning.privacy.digests import KeyedDigest, state_digest
from lipdp_lightning.privacy.keys import derive_key, new_secret

SECRET = bytes(range(16))
KEY = derive_key(SECRET, "test")

# Tuples that a careless encoding maps to the same message.
CONFUSABLE = [
    ("a", 12, 3),
    ("a", 1, 23),
    ("a", 123),
    ("a1", 2, 3),
    ("a", b"12", 3),
    ("a", b"12", b"3"),
    ("a", b"123"),
    ("a", b"1", b"23"),
    ("a", -12, 3),
    ("a", 0),
    ("a", 0, 0),
    ("a", b""),
    ("a", b"", b""),
    ("a",),
    ("", b"a"),
    ("a", 1 << 100),
    ("a", (1).to_bytes(16, "big")),
    ("a", 1),
]


def repeated_keys(derive: Callable[..., bytes]) -> int:
    return len(CONFUSABLE) - len({derive(SECRET, *indices) for indices in CONFUSABLE})


def joined_key(secret: bytes, purpose: str, *indices: int | bytes) -> bytes:
    parts = (index if isinstance(index, bytes) else str(index).encode() for index in indices)
    return derive_key(secret, "x", b"".join([purpose.encode(), *parts]))


def test_keys_of_different_indices_differ() -> None:
    assert repeated_keys(derive_key) == 0
    assert repeated_keys(joined_key) > 0


@given(
    st.lists(st.integers(-(2**127), 2**127 - 1) | st.binary(max_size=20), max_size=4),
    st.lists(st.integers(-(2**127), 2**127 - 1) | st.binary(max_size=20), max_size=4),
)
def test_key_encoding_is_injective(left: list[int | bytes], right: list[int | bytes]) -> None:
    same = [type(x) for x in left] == [type(x) for x in right] and left == right
    assert (derive_key(SECRET, "p", *left) == derive_key(SECRET, "p", *right)) == same


def test_keys_depend_on_the_secret_and_accept_numpy_integers() -> None:
    assert derive_key(bytes(16), "a", 1) != derive_key(SECRET, "a", 1)
    assert derive_key(SECRET, "a", np.int64(7)) == derive_key(SECRET, "a", 7)
    assert len(derive_key(SECRET, "a")) == 32


def test_bad_secrets_keys_and_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="HINT"):
        derive_key(b"short", "noise")
    with pytest.raises(ValueError, match="HINT"):
        derive_key(SECRET, "noise", 1 << 127)
    with pytest.raises(ValueError, match="HINT"):
        CounterStream(SECRET)
    with pytest.raises(TypeError):
        derive_key(SECRET, "noise", 1.5)  # type: ignore[arg-type]


def test_secrets_are_128_fresh_bits() -> None:
    secrets = [new_secret() for _ in range(64)]
    assert len(set(secrets)) == 64 and {len(secret) for secret in secrets} == {16}
    ones = sum(byte.bit_count() for secret in secrets for byte in secret)
    assert abs(ones - 4096) < 5 * math.sqrt(8192) / 2


def test_stream_is_aes_256_counter_mode() -> None:
    """The AES-256-CTR example of NIST SP 800-38A, F.5.5."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    cipher = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
    stream = CounterStream(key, position=int.from_bytes(range(0xF0, 0x100), "big"))
    assert bytes(a ^ b for a, b in zip(stream.bytes(32), plain, strict=True)) == cipher


def test_pieces_drawn_in_any_order_and_thread_equal_one_draw() -> None:
    whole = CounterStream(KEY).uint64(200_000)
    starts = list(range(0, 200_000, 14_286))  # even: whole blocks

    def piece(start: int) -> np.ndarray:
        return CounterStream(KEY, position=start // 2).uint64(min(14_286, 200_000 - start))

    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(piece, reversed(starts)))[::-1]
    assert np.array_equal(np.concatenate(pieces), whole)
    stream = CounterStream(KEY)
    in_sequence = [stream.uint64(100_000), stream.uint64(100_000)]
    assert np.array_equal(np.concatenate(in_sequence), whole)


def test_successive_draws_share_no_block() -> None:
    stream = CounterStream(KEY)
    first, second = stream.bytes(5), stream.bytes(16)
    assert stream.position == 2
    assert first + bytes(11) != second and second == CounterStream(KEY, position=1).bytes(16)
    normals = stream.normal(3)
    assert stream.position == 4
    assert not torch.isin(normals, CounterStream(KEY).normal(3)).any()
    apart = [CounterStream(KEY, position=position).normal(1000) for position in (0, 1, 500, 1 << 16)]
    assert len(torch.unique(torch.cat(apart))) == 4000
    assert stream.bytes(0) == b"" and stream.normal(0).numel() == 0 and stream.position == 4


def test_bytes_are_uniform() -> None:
    counts = np.bincount(np.frombuffer(CounterStream(KEY).bytes(1 << 20), np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    top_bits = CounterStream(KEY).uint64(1 << 16) >> np.uint64(63)
    assert abs(int(top_bits.sum()) - (1 << 15)) < 4 * math.sqrt(1 << 16) / 2


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(4, 3, generator=generator),
        "layer.bias": torch.randn(4, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(0.0, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "mask": torch.tensor([True, False]),
    }


def changed_states() -> dict[str, bytes]:
    """The digest after each change that must not repeat the noise."""
    states: dict[str, bytes] = {"none": state_digest(weights(), b"plan", b"data")}
    for name in ("layer.weight", "layer.bias"):
        changed = weights()
        changed[name].view(torch.uint8).reshape(-1)[-1] ^= 1  # one bit
        states[f"a bit of {name}"] = state_digest(changed, b"plan", b"data")
    negative = weights()
    negative["scale"] = torch.tensor(-0.0, dtype=torch.float64)
    states["negative zero"] = state_digest(negative, b"plan", b"data")
    reshaped = weights()
    reshaped["layer.weight"] = reshaped["layer.weight"].reshape(3, 4)
    states["shape"] = state_digest(reshaped, b"plan", b"data")
    retyped = weights()
    retyped["layer.bias"] = retyped["layer.bias"].view(torch.int16)
    states["type"] = state_digest(retyped, b"plan", b"data")
    states["name"] = state_digest({name + "x": tensor for name, tensor in weights().items()}, b"plan", b"data")
    states["order"] = state_digest(dict(list(weights().items())[::-1]), b"plan", b"data")
    states["missing"] = state_digest(dict(list(weights().items())[:-1]), b"plan", b"data")
    for context in ([b"plan2", b"data"], [b"pland", b"ata"], [b"plandata"], [b"data", b"plan"], []):
        states[f"context {context}"] = state_digest(weights(), *context)
    return states


def test_every_change_of_state_changes_the_digest() -> None:
    states = changed_states()
    assert len(set(states.values())) == len(states) and {len(digest) for digest in states.values()} == {32}


def keyed_digest(key: bytes, tensors: dict[str, Tensor]) -> bytes:
    return KeyedDigest(key).of(tensors)


def test_a_keyed_digest_tells_every_bit_of_large_tensors_and_the_key() -> None:
    large = {"a": torch.zeros(5000), "b": torch.zeros(70, 100)}
    reference = keyed_digest(KEY, large)
    assert reference == keyed_digest(KEY, {name: t.t().contiguous().t() for name, t in large.items()})
    digests = {reference, keyed_digest(bytes(32), large), state_digest(large)}
    digests.add(keyed_digest(KEY, {"a": large["a"], "b": large["b"].reshape(100, 70)}))
    digests.add(keyed_digest(KEY, {"b": large["a"], "a": large["b"]}))
    for name, place in (("a", 0), ("a", 4999), ("b", 3333)):
        changed = {n: t.clone() for n, t in large.items()}
        changed[name].view(-1).view(torch.int32)[place] ^= 1
        digests.add(keyed_digest(KEY, changed))
    assert len(digests) == 8 and {len(d) for d in digests} == {32}


def _negated_view(tensor: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([tensor, tensor], -1)).conj().imag


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "nothing": lambda w: None,
    "an entry": lambda w: w["a"].add_(1.0),
    "an entry that torch does not see": lambda w: w["a"].numpy().__setitem__(3, 7.0),
    "an entry by .data": lambda w: w["square"].data.mul_(2.0),
    "other values under the same name": lambda w: w.update(a=w["a"] * 3.0),
    "another storage": lambda w: setattr(w["a"], "data", torch.full((5000,), 2.0)),
    "a transposed view of the same memory": lambda w: setattr(w["square"], "data", w["square"].data.t()),
    "another shape of the same memory": lambda w: setattr(w["square"], "data", w["square"].data.view(40, 160)),
    "a part of the same memory": lambda w: setattr(w["a"], "data", w["a"].data[:4000]),
    "a negated view": lambda w: w.update(square=_negated_view(w["square"])),
    "a name": lambda w: w.update(c=w.pop("a")),
    "one less": lambda w: w.pop("a"),
    "one more": lambda w: w.update(more=torch.ones(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_keyed_digest_that_was_taken_before_sees_every_change(change: str) -> None:
    """It reads tensors where they lay the last time, and hence must notice when they lie elsewhere."""
    tensors = {"a": torch.arange(5000.0), "square": torch.arange(6400.0).reshape(80, 80), "b": torch.ones(3)}
    kept = KeyedDigest(KEY)
    before = kept.of(tensors)
    assert kept.of(tensors) == before
    CHANGES[change](tensors)
    after = kept.of(tensors)
    assert after == keyed_digest(KEY, tensors) == kept.of(tensors)
    assert (after == before) == (change == "nothing")


def test_digest_is_of_values_not_of_layout() -> None:
    plain = weights()
    reference = state_digest(plain, b"plan")
    moved = {name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in plain.items()}
    moved["layer.weight"] = plain["layer.weight"].t().contiguous().t()
    moved["layer.bias"] = plain["layer.bias"].repeat_interleave(2)[::2]
    assert not any(moved[name].is_contiguous() for name in ("layer.weight", "layer.bias"))
    assert state_digest(moved, b"plan") == reference
