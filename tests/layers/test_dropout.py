"""Dropout masks are a function of (key, example, position): no other example's presence changes them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipdp_lightning.layers import KeyedDropout
from lipdp_lightning.layers.dropout import mixed_bits

KEY = 0x1234_5678_9ABC_DEF


def keyed(p, ids, key=KEY):
    layer = KeyedDropout(p).train()
    layer.context = (key, ids)
    return layer


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 4, 4)])
def test_removing_or_moving_an_example_leaves_other_masks_bitwise_alone(shape):
    ids = torch.randperm(100_000)[:256]
    x = torch.randn(256, *shape)
    full = keyed(0.5, ids)(x)
    for removed in (0, 100, 255):
        rest = torch.arange(256) != removed
        assert torch.equal(keyed(0.5, ids[rest])(x[rest]), full[rest])
    order = torch.randperm(256)
    assert torch.equal(keyed(0.5, ids[order])(x[order]), full[order])
    assert not torch.equal(keyed(0.5, ids, KEY + 1)(x) == 0, full == 0)


def shift_in_bounds(dropout):
    """How far the summed gradient moves when one of 256 examples is removed, over one example's bound."""
    torch.manual_seed(0)
    p, features, classes = 0.5, 32, 10
    x = F.normalize(torch.rand(256, features), dim=1)
    labels = torch.randint(classes, (256,))
    weight = torch.zeros(classes, features, requires_grad=True)

    def gradient(rows):
        loss = F.cross_entropy(dropout(p, x, rows)[rows] @ weight.t(), labels[rows], reduction="sum")
        return torch.autograd.grad(loss, weight)[0]

    everyone = torch.arange(256)
    shift = gradient(everyone) - gradient(everyone[1:])
    return float(shift.norm()) / (math.sqrt(2) / (1 - p))


def test_the_sum_moves_by_one_example_at_most():
    def by_example(p, x, rows):
        out = torch.zeros_like(x)
        out[rows] = keyed(p, rows)(x[rows])
        return out

    def by_row(p, x, rows):
        torch.manual_seed(5)
        out = torch.zeros_like(x)
        out[rows] = nn.Dropout(p).train()(x[rows])
        return out

    assert shift_in_bounds(by_example) <= 1.0
    assert shift_in_bounds(by_row) > 3.0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0])
def test_rate_and_scale(p):
    count = 400_000
    out = keyed(p, torch.arange(400))(torch.ones(400, count // 400, dtype=torch.float64))
    kept = out != 0
    assert abs(float(kept.double().mean()) - (1 - p)) <= 4.5 * math.sqrt(p * (1 - p) / count)
    if 0 < p < 1:
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_evaluation_is_the_identity(p):
    x = torch.randn(3, 4)
    layer = KeyedDropout(p).eval()
    assert torch.equal(layer(x), x)


def test_the_gradient_passes_through_the_mask():
    x = torch.ones(5, 6, requires_grad=True)
    out = keyed(0.5, torch.arange(5))(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_training_without_ids_or_with_those_of_another_batch_is_refused():
    layer = KeyedDropout(0.5).train()
    with pytest.raises(ValueError, match=r"no example ids.*HINT"):
        layer(torch.ones(2, 3))
    for stale in (1, 3, 7):
        layer.context = (KEY, torch.arange(stale))
        with pytest.raises(ValueError, match=r"ids of another number of examples than the batch\D*HINT"):
            layer(torch.ones(2, 3))


def test_empty_batches():
    x = torch.zeros(0, 3, requires_grad=True)
    out = keyed(0.5, torch.zeros(0, dtype=torch.int64))(x)
    assert out.shape == (0, 3)
    out.sum().backward()


def test_bfloat16_keeps_its_dtype_and_mask():
    x = torch.ones(8, 100)
    ids = torch.arange(8)
    wide, narrow = keyed(0.3, ids)(x), keyed(0.3, ids)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(wide == 0, narrow == 0)


@pytest.mark.parametrize("key", [0, 1, -1, KEY, 2**63 - 1, -(2**63)])
def test_bits_look_uniform(key):
    """Bytes by chi-square; single bits by their means; neighbours in id, position and key by correlation."""
    bits = mixed_bits(key, torch.arange(256), 256)
    as_bytes = bits.contiguous().view(torch.uint8).reshape(-1, 8)
    for column in as_bytes.t():
        counts = torch.bincount(column.long(), minlength=256).double()
        chi = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255)
    signs = torch.stack([((bits >> b) & 1).double() * 2 - 1 for b in (0, 1, 31, 62, 63)])
    limit = 5 / math.sqrt(bits.numel())
    assert float(signs.mean((1, 2)).abs().max()) < limit
    others = {
        "id": signs.roll(1, 1), "position": signs.roll(1, 2), "far": signs.roll((16, 16), (1, 2)),
        "transposed": signs.transpose(1, 2),
    }  # fmt: skip
    for other in others.values():
        assert float((signs * other).mean((1, 2)).abs().max()) < 2 * limit
    neighbour = mixed_bits(key + 1 if key < 2**63 - 1 else key - 1, torch.arange(256), 256)
    assert float((signs[4] * (((neighbour >> 63) & 1).double() * 2 - 1)).mean().abs()) < limit


def test_large_ids_and_all_positions_differ():
    ids = torch.tensor([0, 1, 2**31, 2**32, 2**40 + 7, 2**62])
    bits = mixed_bits(KEY, ids, 1000)
    assert bits.unique().numel() == bits.numel()
    torch.testing.assert_close(mixed_bits(KEY, ids[3:4], 1000), bits[3:4])
    torch.testing.assert_close(mixed_bits(KEY, ids, 10), bits[:, :10])
