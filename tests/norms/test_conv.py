"""Convolution norms against the explicit matrix of torch's own layer, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipdp_lightning.norms import conv_norm, dense_norm, kappa, output_size
from lipdp_lightning.norms.conv import frequencies

conv_norm_fast, conv_norm_tight = partial(conv_norm, method="fast"), partial(conv_norm, method="tight")
conv_norm_exact = partial(conv_norm, method="exact")

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@dataclass(frozen=True)
class Case:
    kernel: Tensor
    size: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    padding_mode: str = "zeros"

    def arguments(self, sized: bool = True) -> dict[str, Any]:
        given: dict[str, Any] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "padding_mode": self.padding_mode,
        }
        return {**given, "input_size": self.size} if sized else given


def matrix(case: Case) -> Tensor:
    """The layer applied to the identity basis."""
    inputs = case.kernel.shape[1] * case.groups
    layer_type: Any = nn.Conv1d if case.kernel.ndim == 3 else nn.Conv2d
    layer = layer_type(
        inputs, case.kernel.shape[0], tuple(case.kernel.shape[2:]), bias=False, **case.arguments(sized=False)
    ).double()
    layer.weight.data.copy_(case.kernel)
    count = inputs * math.prod(case.size)
    with torch.no_grad():
        return layer(torch.eye(count, dtype=torch.float64).reshape(count, inputs, *case.size)).flatten(1)


def truth(case: Case) -> float:
    return float(torch.linalg.svdvals(matrix(case))[0])


def violations(bound: Callable[[Case], float], cases: Sequence[Case]) -> list[tuple[float, Case]]:
    """Cases whose bound lies below the truth, by more than 1e-9 of it."""
    ratios = [(bound(case) / truth(case), case) for case in cases]
    return [(ratio, case) for ratio, case in ratios if ratio < 1.0 - 1e-9]


def random_kernel(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regular_cases() -> list[Case]:
    """Shapes of ordinary layers: the input is a few times longer than the dilated kernel."""
    kernels_1d = [(3, 2, 3), (2, 3, 5), (4, 1, 2), (1, 4, 7), (3, 3, 1)]
    cases = []
    for seed, shape in enumerate(kernels_1d):
        kernel = random_kernel(seed, *shape)
        half = shape[-1] // 2
        cases += [
            Case(kernel, (24,), 1, half),
            Case(kernel, (24,), 1, 0),
            Case(kernel, (23,), 2, half),
            Case(kernel, (30,), 1, 2 * half, 2),
            Case(kernel, (29,), 3, half, 2),
            Case(kernel, (24,), 1, half, 1, 1, "circular"),
            Case(kernel, (24,), 2, half, 1, 1, "circular"),
        ]
    plain = random_kernel(10, 3, 2, 3, 3)
    wide = random_kernel(11, 2, 2, 5, 5)
    uneven = random_kernel(12, 2, 3, 3, 2)
    grouped = random_kernel(13, 4, 2, 3, 3)
    depthwise = random_kernel(14, 3, 1, 3, 3)
    patchify = random_kernel(15, 5, 2, 4, 4)
    pointwise = random_kernel(16, 4, 3, 1, 1)
    return [
        *cases,
        Case(plain, (10, 10), 1, 1),
        Case(plain, (9, 11), 1, 0),
        Case(plain, (10, 9), 2, 1),
        Case(plain, (11, 12), (1, 2), (1, 0)),
        Case(plain, (12, 12), 1, 2, 2),
        Case(plain, (14, 14), 2, 2, 2),
        Case(plain, (15, 15), 3, 1, (1, 2)),
        Case(plain, (10, 10), 1, "same"),
        Case(plain, (10, 10), 1, 1, 1, 1, "circular"),
        Case(plain, (10, 12), 2, 1, 1, 1, "circular"),
        Case(plain, (12, 12), 1, 2, 2, 1, "circular"),
        Case(wide, (14, 14), 1, 2),
        Case(wide, (15, 15), 2, 2),
        Case(wide, (12, 12), 1, 2, 1, 1, "circular"),
        Case(uneven, (10, 10), 1, (1, 1)),
        Case(uneven, (10, 10), 1, "same"),
        Case(uneven, (10, 10), 1, "same", 1, 1, "circular"),
        Case(uneven, (11, 10), 2, (1, 0), (1, 2)),
        Case(grouped, (10, 10), 1, 1, 1, 2),
        Case(grouped, (10, 10), 2, 1, 1, 2),
        Case(depthwise, (12, 12), 1, 1, 1, 3),
        Case(depthwise, (12, 12), 1, 2, 2, 3),
        Case(depthwise, (12, 12), 1, 1, 1, 3, "circular"),
        Case(patchify, (12, 12), 4, 0),
        Case(patchify, (11, 12), 3, 1),
        Case(pointwise, (7, 7), 1, 0),
        Case(pointwise, (7, 8), 2, 0),
    ]


REGULAR = regular_cases()

METHODS = {
    "fast": conv_norm_fast,
    "tight": conv_norm_tight,
    "exact": conv_norm_exact,
    "auto": conv_norm,
}


def by(method: str, sized: bool = True) -> Callable[[Case], float]:
    return lambda case: METHODS[method](case.kernel, **case.arguments(sized))


def test_there_are_enough_shapes() -> None:
    assert len(REGULAR) >= 40


@pytest.mark.parametrize("method", METHODS)
def test_never_below_the_truth(method: str) -> None:
    assert violations(by(method), REGULAR) == []


@pytest.mark.parametrize("method", ["fast", "tight", "auto"])
def test_never_below_the_truth_without_the_size(method: str) -> None:
    zero_padded = [case for case in REGULAR if case.padding_mode == "zeros"]
    assert violations(by(method, sized=False), zero_padded) == []


@pytest.mark.parametrize(("method", "limit"), [("tight", 1.25), ("auto", 1.25), ("exact", 1.0)])
def test_ratio_to_the_truth(method: str, limit: float) -> None:
    worst = max(by(method)(case) / truth(case) for case in REGULAR)
    assert worst <= limit * (1 + 1e-8)


def at_most_one_period(case: Case) -> bool:
    sizes = output_size(tuple(case.kernel.shape[2:]), case.stride, case.dilation, case.padding, "circular", case.size)
    strides = (case.stride,) * len(sizes)
    return all(out * stride <= size for out, stride, size in zip(sizes, strides, case.size, strict=True))


def test_circular_convolution_is_exact_on_its_own_torus() -> None:
    circular = [case for case in REGULAR if case.padding_mode == "circular" and at_most_one_period(case)]
    assert len(circular) >= 9
    for case in circular:
        assert conv_norm_tight(case.kernel, **case.arguments()) <= truth(case) * 1.001


# Degenerate shapes: kernels longer than the input, padding beyond the kernel, wrap-around several times, sums of
# extreme kernels. Only soundness is asked for.
degenerate = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 9))


@settings(max_examples=150, deadline=None)
@given(
    degenerate,
    degenerate,
    st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    st.integers(1, 2),
    st.sampled_from(["normal", "ones", "alternating"]),
    st.integers(0, 2**16),
)
def test_never_below_the_truth_on_degenerate_shapes(
    first: Any, second: Any, mode: str, groups: int, kind: str, seed: int
) -> None:
    one_axis = seed % 2 == 0
    sizes, strides, dilations, paddings, lengths = (
        tuple(pair[:1] if one_axis else pair) for pair in zip(first, second, strict=True)
    )
    kernel = random_kernel(seed, 2 * groups, 2, *sizes)
    if kind == "ones":
        kernel = torch.ones_like(kernel)
    if kind == "alternating":
        signs = torch.arange(kernel[0, 0].numel()).reshape(sizes) % 2 * 2.0 - 1.0
        kernel = signs.expand_as(kernel).double().clone()
    case = Case(kernel, lengths, strides, paddings, dilations, groups, mode)
    try:
        norm = truth(case)
    except RuntimeError:  # torch refuses the shape
        with pytest.raises(ValueError, match="HINT"):
            conv_norm(kernel, **case.arguments())
        return
    for method in METHODS:
        assert by(method)(case) >= norm * (1 - 1e-9), method
    if mode == "zeros":
        assert conv_norm_tight(kernel, **case.arguments(sized=False)) >= norm * (1 - 1e-9)


# Unsound variants: the same check must report each.


def power_iteration(case: Case) -> float:
    operator = matrix(case)
    vector = torch.ones(operator.shape[0], dtype=torch.float64)
    for _ in range(5):
        vector = operator @ (operator.T @ vector)
        vector = vector / vector.norm()
    return float((operator.T @ vector).norm())


def bare_torus(case: Case) -> float:
    """Largest singular value of the symbol on a torus of the unpadded input's size."""
    dims = tuple(range(2, case.kernel.ndim))
    symbol = torch.fft.fftn(case.kernel, s=case.size, dim=dims).flatten(2).permute(2, 0, 1)
    return float(torch.linalg.svdvals(symbol).max())


def without_kappa(case: Case) -> float:
    return dense_norm(case.kernel.flatten(1))


def textbook_overlap(case: Case) -> float:
    overlap = math.prod(math.ceil(k / case.stride) for k in case.kernel.shape[2:])
    return math.sqrt(overlap) * dense_norm(case.kernel.flatten(1))


def as_if_zero_padded(method: str) -> Callable[[Case], float]:
    return lambda case: METHODS[method](case.kernel, **{**case.arguments(), "padding_mode": "zeros"})


def test_power_iteration_is_reported() -> None:
    assert len(violations(power_iteration, REGULAR)) >= 5


def test_torus_of_the_bare_image_is_reported_for_zero_padding() -> None:
    difference = torch.tensor([[[1.0, -1.0, 0.0]]], dtype=torch.float64)
    cases = [Case(difference, (3,), 1, 1), Case(difference.unsqueeze(-1) * difference.unsqueeze(-2), (3, 3), 1, 1)]
    reported = violations(bare_torus, cases)
    assert len(reported) == 2 and min(ratio for ratio, _ in reported) < 0.93
    assert violations(by("tight"), cases) == []


def test_fast_bound_without_kappa_is_reported() -> None:
    assert len(violations(without_kappa, REGULAR)) >= 20


def test_textbook_overlap_with_dilation_is_reported() -> None:
    ones = torch.full((1, 1, 3, 3), 1 / 3, dtype=torch.float64)
    case = Case(ones, (9, 9), 2, 2, 2)
    assert textbook_overlap(case) == pytest.approx(2.0)
    assert truth(case) > 2.31
    assert violations(textbook_overlap, [case])
    assert violations(by("fast"), [case]) == []


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("method", ["fast", "tight"])
def test_border_copies_counted_as_zeros_are_reported(mode: str, method: str) -> None:
    kernels = [torch.ones(1, 1, 3, 3, dtype=torch.float64) / 3, torch.ones(1, 1, 1, 1, dtype=torch.float64)]
    cases = [Case(kernel, (size, size), 1, 1, 1, 1, mode) for kernel in kernels for size in (2, 3, 4, 9)]
    assert len(violations(as_if_zero_padded(method), cases)) >= 4
    assert violations(by(method), cases) == []


def test_reflect_padding_exceeds_three_where_zero_padding_gives_three() -> None:
    case = Case(torch.full((1, 1, 3, 3), 1 / 3, dtype=torch.float64), (3, 3), 1, 1, 1, 1, "reflect")
    assert truth(case) > 3.18
    assert as_if_zero_padded("fast")(case) == pytest.approx(3.0)


def test_samples_without_their_factor_are_reported() -> None:
    """Few frequencies of a large torus miss the maximum: two do, for a kernel that peaks between them."""
    kernel = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)

    def two_samples(case: Case) -> float:
        angles = torch.tensor([0.0, math.pi], dtype=torch.float64)
        taps = torch.arange(3, dtype=torch.float64)
        return float((torch.exp(-1j * angles[:, None] * taps) @ kernel[0, 0].to(torch.complex128)).abs().max())

    assert violations(two_samples, [Case(kernel, (40,), 1, 1)])


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_bounds_without_a_size_hold_in_the_limit_of_large_inputs(taps: int) -> None:
    for seed in range(5):
        kernel = random_kernel(seed, 2, 2, taps)
        large = truth(Case(kernel, (150,), 1, taps // 2))
        assert large <= conv_norm_tight(kernel, padding=1) <= 1.02 * large


def test_large_torus_is_sampled_and_stays_above() -> None:
    """Beyond 16 points per tap the grid is fixed: the bound no longer depends on the size, and is above 1-D truth."""
    kernel = random_kernel(5, 2, 2, 3)
    bounds = [conv_norm_tight(kernel, padding=1, input_size=size) for size in (100, 200)]
    assert bounds[0] == bounds[1] >= truth(Case(kernel, (200,), 1, 1))


def on_coarse_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp_lightning.norms.conv._FINE_PRODUCTS", 0)


def large_cases() -> list[Case]:
    """Inputs far beyond the coarse grid; among them kernels that peak between its points."""
    difference = torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64)
    square = difference.unsqueeze(-1) * difference.unsqueeze(-2)
    return [
        Case(difference, (300,), 1, 1),
        Case(square, (40, 40), 1, 1),
        Case(random_kernel(20, 2, 1, 3, 3), (30, 30), 1, 1),
        Case(random_kernel(21, 1, 2, 3, 3), (30, 30), 2, 1),
        Case(random_kernel(22, 2, 2, 5), (120,), 1, 2),
        Case(random_kernel(23, 1, 2, 3), (200,), 1, 2, 2),
    ]


def test_coarse_grids_stay_above_the_truth_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = [by("tight")(case) for case in large_cases()]
    on_coarse_grids(monkeypatch)
    assert violations(by("tight"), [*REGULAR, *large_cases()]) == []
    assert max(by("tight")(case) / truth(case) for case in REGULAR) <= 1.25
    coarse = [by("tight")(case) for case in large_cases()]
    assert coarse != fine
    assert all(c <= 1.035 * f for c, f in zip(coarse, fine, strict=True))


def test_coarse_grids_without_their_factor_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    on_coarse_grids(monkeypatch)

    def no_factor(axis: Any, taps: int, per_tap: int) -> tuple[int, float]:
        return frequencies(axis, taps, per_tap)[0], 1.0

    monkeypatch.setattr("lipdp_lightning.norms.conv.frequencies", no_factor)
    assert len(violations(by("tight"), large_cases())) >= 2


def test_large_kernels_are_sampled_coarsely() -> None:
    """The bound of many channels is at most 3 % above that of the same kernel on the fine grid."""
    kernel = random_kernel(24, 96, 96, 3, 3)
    coarse = conv_norm_tight(kernel, padding=1, input_size=64)
    largest = torch.linalg.svdvals(
        torch.fft.fftn(kernel, s=(24, 24), dim=(2, 3)).flatten(2)[:, :, :312].permute(2, 0, 1)
    ).max()
    assert float(largest) <= coarse <= 1.035 * float(largest) * 1.01


def test_groups_take_the_maximum() -> None:
    kernel = random_kernel(6, 4, 2, 3, 3)
    kernel[:2] *= 10.0
    arguments: dict[str, Any] = {"padding": 1, "input_size": 8}
    for method in METHODS:
        whole = conv_norm(kernel, groups=2, method=method, **arguments)
        assert whole == pytest.approx(conv_norm(kernel[:2], method=method, **arguments), rel=1e-3)
        assert whole > 5 * conv_norm(kernel[2:], method=method, **arguments)


def test_auto_is_never_above_the_fast_bound() -> None:
    for mode in ("zeros", "reflect"):
        for seed in range(4):
            case = Case(random_kernel(seed, 8, 8, 3, 3), (24, 24), 1, 1, 1, 1, mode)
            assert conv_norm(case.kernel, **case.arguments()) <= conv_norm_fast(case.kernel, **case.arguments())


def test_auto_is_exact_on_small_inputs() -> None:
    case = Case(torch.ones(1, 1, 3, 3, dtype=torch.float64), (3, 3), 3, 2, 3)
    assert conv_norm_tight(case.kernel, **case.arguments()) > 4 * truth(case)
    assert conv_norm(case.kernel, **case.arguments()) == pytest.approx(truth(case), rel=1e-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-900, 900])
def test_scale_of_the_weights_does_not_matter(method: str, exponent: int) -> None:
    kernel = random_kernel(7, 2, 2, 3)
    scaled = torch.ldexp(kernel, torch.tensor(exponent, dtype=torch.float64))
    plain = conv_norm(kernel, padding=1, input_size=9, method=method)
    found = conv_norm(scaled, padding=1, input_size=9, method=method)
    assert found == pytest.approx(math.ldexp(plain, exponent), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_kernels_are_certified_as_they_are_stored(dtype: torch.dtype) -> None:
    kernel = random_kernel(8, 3, 2, 3, 3).to(dtype)
    case = Case(kernel.double(), (9, 9), 1, 1)
    for method in METHODS:
        assert conv_norm(kernel, method=method, **case.arguments()) == by(method)(case)


@pytest.mark.parametrize("method", METHODS)
def test_zero_kernel(method: str) -> None:
    assert conv_norm(torch.zeros(2, 2, 3, 3), padding=1, input_size=8, method=method) == 0.0
    one_group = torch.zeros(2, 1, 3, 3)
    one_group[1, 0, 1, 1] = 1.0
    norm = conv_norm(one_group, padding=1, input_size=16, groups=2, method=method)
    assert 1.0 <= norm <= (3.0 + 1e-9 if method == "fast" else 1.4)


def test_disjoint_patches_give_the_dense_norm() -> None:
    kernel = random_kernel(9, 5, 3, 4, 4)
    dense = dense_norm(kernel.flatten(1))
    assert kappa((4, 4), 4) == 1.0
    for method in ("fast", "tight", "auto"):
        assert conv_norm(kernel, stride=4, input_size=64, method=method) == pytest.approx(dense, rel=1e-3)


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (torch.full((1, 1, 3), math.nan), {}),
        (torch.full((1, 1, 3, 3), math.inf), {}),
        (torch.ones(2, 2), {}),
        (torch.ones(1, 1, 3, 3, 3), {}),
        (torch.ones(3, 1, 3), {"groups": 2}),
        (torch.ones(1, 1, 3), {"method": "power"}),
        (torch.ones(1, 1, 3), {"padding": 1, "padding_mode": "reflect"}),
        (torch.ones(1, 1, 3), {"padding": 1, "padding_mode": "circular", "stride": 2}),
        (torch.ones(1, 1, 3), {"padding": 2, "padding_mode": "circular", "method": "tight"}),
        (torch.ones(1, 1, 3), {"padding": 1, "padding_mode": "circular", "stride": 2, "method": "tight"}),
        (torch.ones(1, 1, 3), {"method": "exact"}),
    ],
)
def test_what_cannot_be_certified_is_refused(kernel: Tensor, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        conv_norm(kernel, **arguments)
