"""CotangentClip and scale_cotangent: the identity forward, a public radius per example backward."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds import certify
from lipdp_lightning.layers import CotangentClip, scale_cotangent

SHAPES = [(), (5,), (3, 4), (2, 3, 4)]


def pulled_back(layer, cotangent):
    x = torch.randn(cotangent.shape).to(cotangent.dtype).requires_grad_()
    layer(x).backward(cotangent)
    return x.grad


def row_norms(rows):
    return rows.double().unsqueeze(-1).flatten(1).norm(dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [1e-6, 0.5, 1e4])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-12), (torch.float32, 2**-21), (torch.bfloat16, 2**-8)])
def test_every_row_is_clipped_to_the_radius(shape, radius, dtype, slack):
    torch.manual_seed(0)
    sizes = torch.logspace(-8, 10, 40).reshape(-1, *(1,) * len(shape))
    cotangent = (torch.randn(40, *shape) * sizes).to(dtype)
    clipped = pulled_back(CotangentClip(radius), cotangent)
    assert float(row_norms(clipped).max()) <= radius * (1 + slack)
    inside = row_norms(cotangent) < radius
    assert torch.equal(clipped[inside], cotangent[inside])
    outside = ~inside
    expected = radius / row_norms(cotangent)[outside]
    ratio = row_norms(clipped)[outside] / row_norms(cotangent)[outside]
    torch.testing.assert_close(ratio, expected, rtol=2 * slack + 1e-6, atol=0)


def test_long_constant_rows_are_clipped_too():
    """A norm accumulated one by one in float32 is off by 1e-4 here, and the row would be too long by as much."""
    cotangent = torch.full((1, 1_000_000), 1 / 3)
    assert abs(float(torch.linalg.vector_norm(cotangent)) / float(row_norms(cotangent)) - 1) > 1e-4
    clipped = pulled_back(CotangentClip(1.0), cotangent)
    assert float(row_norms(clipped)) == pytest.approx(1.0, rel=2**-20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layer", [CotangentClip(1.0), lambda x: scale_cotangent(x, torch.full((4,), 0.5))])
def test_a_row_that_is_not_finite_becomes_zero(bad, layer):
    cotangent = torch.ones(4, 3)
    cotangent[2, 1] = bad
    out = pulled_back(layer, cotangent)
    assert torch.equal(out[2], torch.zeros(3))
    assert bool((out[[0, 1, 3]] > 0).all())


def test_every_reader_is_clipped_together():
    """The clip acts on the accumulated cotangent; clipping each reader's own would leave twice the radius."""
    x = torch.randn(3, 4, requires_grad=True)
    y = CotangentClip(1.0)(x)
    (5 * y).sum().backward(retain_graph=True)
    (5 * y + 7 * y.flip(1)).sum().backward()
    x.grad = None
    y = CotangentClip(1.0)(x)
    (5 * y + 7 * y.flip(1)).sum().backward()
    torch.testing.assert_close(row_norms(x.grad), torch.ones(3, dtype=torch.float64))
    x.grad = None
    apart = CotangentClip(1.0)
    (5 * apart(x) + 7 * apart(x).flip(1)).sum().backward()
    assert float(row_norms(x.grad).min()) > 1.9


def test_scaling_multiplies_rows_and_nothing_else():
    x = torch.randn(4, 2, 3, requires_grad=True, dtype=torch.float64)
    factor = torch.tensor([0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    out = scale_cotangent(x, factor)
    assert torch.equal(out, x)
    cotangent = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(out, x, cotangent)
    torch.testing.assert_close(gradient, cotangent * factor.reshape(4, 1, 1))


def test_a_factor_that_is_not_finite_removes_its_row():
    out = pulled_back(lambda x: scale_cotangent(x, torch.tensor([math.inf, math.nan, 2.0])), torch.ones(3, 2))
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]


def test_rows_are_scaled_alike_by_a_loop_and_by_torch():
    cotangent = torch.randn(9, 4, 3)
    cotangent[5, 1, 1], cotangent[6, 0, 0], cotangent[7] = math.nan, math.inf, 1e19
    factor = torch.tensor([0.0, 0.3, 1e12, math.inf, math.nan, 1.0, 0.0, 1e3, 1e-3])
    by_torch = pulled_back(lambda x: scale_cotangent(x, factor), cotangent.transpose(1, 2).contiguous().transpose(1, 2))
    by_loop = pulled_back(lambda x: scale_cotangent(x, factor), cotangent)
    assert torch.equal(by_loop, by_torch)
    assert (by_loop.flatten(1).abs().amax(1) > 0).tolist() == [False, True, True, *[False] * 5, True]


def test_clip_comes_before_scale():
    """logits -> scale -> clip -> loss, so that backward clips first: ||c clip(d)|| <= c R. In the other order a
    small factor hides a large cotangent from the clip, and a large one is undone by it."""
    cotangent = torch.full((2, 4), 100.0)
    factor = torch.tensor([1e-3, 50.0])
    right = pulled_back(lambda x: CotangentClip(1.0)(scale_cotangent(x, factor)), cotangent)
    torch.testing.assert_close(row_norms(right), factor.double())
    wrong = pulled_back(lambda x: scale_cotangent(CotangentClip(1.0)(x), factor), cotangent)
    assert float(row_norms(wrong)[0]) > 100 * float(factor[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_empty_batches(shape):
    cotangent = torch.zeros(0, *shape)
    assert pulled_back(CotangentClip(1.0), cotangent).shape == cotangent.shape
    assert pulled_back(lambda x: scale_cotangent(x, torch.zeros(0)), cotangent).shape == cotangent.shape


def test_the_certificate_takes_the_radius_as_a_cap():
    def cotangent_of(*between):
        model = nn.Sequential(nn.Linear(4, 3), *between, nn.Linear(3, 2)).double()
        nn.init.constant_(model[-1].weight, 10.0)
        certificate = certify(model, (4,), 1.0, "cross_entropy", compute_dtype=torch.float64)
        return certificate.group("0").uses[0].cotangent_bound

    free = cotangent_of()
    assert cotangent_of(CotangentClip(0.25)) == 0.25 < free
    assert cotangent_of(CotangentClip(2 * free)) == pytest.approx(free)
    assert cotangent_of(CotangentClip(0.25), nn.ReLU()) == 0.25
    # a clip bounds what it passes on: what comes after multiplies again
    scaled = cotangent_of(nn.LeakyReLU(-3.0), CotangentClip(0.25))
    assert scaled == pytest.approx(0.75)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, math.nan])
def test_radii_are_positive_and_finite(radius):
    with pytest.raises(ValueError, match=r"is not positive and finite. HINT"):
        CotangentClip(radius)


def test_the_clip_copies_and_pickles():
    for twin in (copy.deepcopy(CotangentClip(0.5)), pickle.loads(pickle.dumps(CotangentClip(0.5)))):
        assert twin.radius == 0.5
        assert not twin.state_dict()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_factor_for_each_row_or_none(rows: int) -> None:
    """What lies behind a short one is no factor."""
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(AssertionError, match="a factor for each row"):
        torch.autograd.grad(scale_cotangent(x, torch.ones(rows)), x, torch.ones(4, 3))


def test_two_modules_with_clips_have_their_own_radii_and_both_bind() -> None:
    from private_step import Harness, make_network, make_plan, random_batch

    from lipdp_lightning.bounds.identity import TrustedHook

    network, shape = make_network("mlp", gain=6.0)
    radii = {"1": 0.02, "3": 0.005}
    own = Harness(network, shape, make_plan(cotangent_clip=list(radii.items()), max_norm=None))
    largest: dict[str, float] = {}

    def watch(path: str, output: torch.Tensor) -> None:
        def look(cotangent: torch.Tensor) -> None:
            largest[path] = max(largest.get(path, 0.0), cotangent.norm(dim=1).max().item())

        output.register_hook(look)

    for path in radii:  # before the clip's own hook: its output, not what reads it
        looking = TrustedHook(lambda module, args, output, path=path: watch(path, output))
        own.module.network.get_submodule(path).register_forward_hook(looking, prepend=True)
    own.accumulate(random_batch(64, shape, 5))
    for path, radius in radii.items():
        assert radius * (1 - 1e-4) < largest[path] <= radius * (1 + 1e-5)
        (use,) = next(g for g in own.mechanism.certificate.groups if g.name == path).uses
        assert use.cotangent_bound <= radius * (1 + 1e-4)
