"""kappa and coverage against fold(unfold(ones)) through torch's own padding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipdp_lightning.norms import coverage, kappa, output_size

MODES = ("zeros", "circular", "reflect", "replicate")


def pad(images: Tensor, padding: tuple[int, int], mode: str) -> Tensor:
    amounts = [padding[1], padding[1], padding[0], padding[0]]
    return F.pad(images, amounts, mode="constant" if mode == "zeros" else mode)


def counted(kernel: Any, stride: Any, dilation: Any, padding: Any, mode: str, size: Any) -> Tensor:
    """How often each pixel is read: the gradient of the sum of all patches, padding included."""
    images = torch.ones(1, 1, *size, dtype=torch.float64, requires_grad=True)
    F.unfold(pad(images, padding, mode), kernel, dilation, 0, stride).sum().backward()
    assert images.grad is not None
    return images.grad[0, 0]


axis = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(1, 14))


@settings(max_examples=250, deadline=None)
@given(axis, axis, st.sampled_from(MODES))
def test_coverage_kappa_and_size_against_torch(first: Any, second: Any, mode: str) -> None:
    kernel, stride, dilation, padding, size = zip(first, second, strict=True)
    try:
        truth = counted(kernel, stride, dilation, padding, mode, size)
    except RuntimeError:  # torch refuses the shape
        with pytest.raises(ValueError, match="HINT"):
            coverage(kernel, stride, dilation, padding, mode, size)
        return
    assert torch.equal(coverage(kernel, stride, dilation, padding, mode, size), truth)
    assert kappa(kernel, stride, dilation, padding, mode, size) == pytest.approx(math.sqrt(truth.max()))
    assert kappa(kernel, stride, dilation, padding, mode, size) ** 2 >= float(truth.max())
    if mode == "zeros":
        assert kappa(kernel, stride, dilation, padding) >= kappa(kernel, stride, dilation, padding, mode, size)
    layer = torch.nn.Conv2d(1, 1, kernel, stride, padding, dilation, padding_mode=mode)
    assert output_size(kernel, stride, dilation, padding, mode, size) == layer(torch.ones(1, 1, *size)).shape[2:]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))
def test_closed_form_is_attained_on_a_large_input(kernel: int, stride: int, dilation: int) -> None:
    large = 4 * kernel * stride * dilation
    assert kappa(kernel, stride, dilation, 0) == kappa(kernel, stride, dilation, 0, "zeros", large)


def test_textbook_overlap_is_too_small_with_dilation() -> None:
    textbook = math.ceil(3 / 2) ** 2
    truth = counted((3, 3), (2, 2), (2, 2), (0, 0), "zeros", (16, 16)).max()
    assert truth == 9 > textbook
    assert kappa((3, 3), 2, 2) == 3.0


def test_zero_padding_count_is_too_small_for_reflect_padding() -> None:
    """At 3 x 3, padding 1: the pixel next to the border is read 4 times per axis, not 3."""
    truth = counted((3, 3), (1, 1), (1, 1), (1, 1), "reflect", (6, 6)).max()
    assert kappa((3, 3), 1, 1, 1, "zeros", (6, 6)) == 3.0 < math.sqrt(truth)
    assert kappa((3, 3), 1, 1, 1, "reflect", (6, 6)) ** 2 == truth


@pytest.mark.parametrize("mode", MODES)
def test_patch_norms_by_coverage_are_exact_in_every_mode(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for kernel, stride, dilation, padding in itertools.product([2, 3], [1, 2], [1, 2], [0, 1, 2]):
        images = torch.randn(4, 3, 7, 9, generator=generator, dtype=torch.float64)
        patches = F.unfold(pad(images, (padding, padding), mode), kernel, dilation, 0, stride)
        weights = coverage((kernel, kernel), stride, dilation, padding, mode, (7, 9))
        expected = patches.square().sum(dim=(1, 2))
        assert torch.allclose((images.square() * weights).sum(dim=(1, 2, 3)), expected, rtol=1e-12)


def test_coverage_of_the_wrong_mode_is_seen_by_the_same_identity() -> None:
    images = torch.ones(1, 1, 5, 5, dtype=torch.float64)
    patches = F.unfold(pad(images, (1, 1), "reflect"), 3)
    zero_weights = coverage((3, 3), 1, 1, 1, "zeros", (5, 5))
    assert float((images.square() * zero_weights).sum()) < float(patches.square().sum())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, (2, 5)])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_same_padding_is_asymmetric_as_in_torch(kernel: Any, dilation: int, mode: str) -> None:
    pair = (kernel, kernel) if isinstance(kernel, int) else kernel
    layer = torch.nn.Conv2d(1, 1, pair, dilation=dilation, padding="same", padding_mode=mode, bias=False)
    layer = layer.double()
    layer.weight.data.fill_(1.0)
    images = torch.zeros(1, 1, 13, 14, dtype=torch.float64, requires_grad=True)
    layer(images).sum().backward()
    assert images.grad is not None
    assert torch.equal(coverage(pair, 1, dilation, "same", mode, (13, 14)), images.grad[0, 0])
    assert output_size(pair, 1, dilation, "same", mode, (13, 14)) == (13, 14)


def test_one_axis_and_pairs_of_padding() -> None:
    assert coverage(3, 1, 1, 1, "zeros", 4).tolist() == [2.0, 3.0, 3.0, 2.0]
    assert coverage(3, 1, 1, [(2, 0)], "zeros", 4).tolist() == [3.0, 3.0, 2.0, 1.0]
    assert output_size(3, 1, 1, "valid", "zeros", 4) == (2,)
    assert coverage(3, 1, 1, 1, "zeros", 4, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": 1, "padding_mode": "reflect"},  # size unknown
        {"padding": 1, "padding_mode": "mirror", "input_size": 5},
        {"padding": "same", "stride": 2, "input_size": 5},
        {"padding": "full", "input_size": 5},
        {"padding": 3, "padding_mode": "reflect", "input_size": 3},
        {"padding": 4, "padding_mode": "circular", "input_size": 3},
        {"input_size": 2},
        {"stride": 0, "input_size": 5},
        {"padding": -1, "input_size": 5},
        {"stride": (1, 1), "input_size": 5},
        {"padding": [(1, 1), (1, 1)], "input_size": 5},
    ],
)
def test_impossible_geometry_is_refused_with_a_hint(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        kappa(3, **arguments)


@settings(max_examples=100, deadline=None)
@given(axis, st.sampled_from(MODES))
def test_kappa_bounds_the_patches_of_random_inputs(one: Any, mode: str) -> None:
    kernel, stride, dilation, padding, size = one
    try:
        bound = kappa(kernel, stride, dilation, padding, mode, size)
    except ValueError:
        assume(False)
    signal = torch.randn(1, 1, 1, size, dtype=torch.float64)
    patches = F.unfold(pad(signal, (0, padding), mode), (1, kernel), (1, dilation), 0, (1, stride))
    assert float(patches.norm()) <= bound * float(signal.norm()) * (1 + 1e-12)
