"""Pools: average pools equal the norm of their explicit matrix; max pools are never exceeded."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, largest_output, starts
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.bounds.rules.pooling import LARGEST_MATRIX, _along, _average_axis


def matrix_of(pool, size):
    """Matrix of a linear pool from the image of every pixel, one channel."""
    basis = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, 1, *size)
    return pool(basis).flatten(1)


def matrix_norm(pool, size):
    return float(torch.linalg.matrix_norm(matrix_of(pool, size), 2))


def rounding(reads):
    """Growth by the roundings on the way back, of a sum of so many, that the margin of an operation does not cover."""
    return (1 + 2.0**-24) ** max(0, int(reads) - 6)


def average_options():
    """torch refuses a padding of more than half of the kernel."""
    for option in all_average_options():
        kernel = option[1] if isinstance(option[1], tuple) else (option[1],)
        if 2 * option[3] <= min(kernel):
            yield option


def all_average_options():
    yield from itertools.product([(7,), (10,)], [1, 2, 3], [1, 2, 3], [0, 1], [False, True], [False, True], [None])
    yield from itertools.product(
        [(6, 7)], [2, (3, 2)], [None, 1, (2, 3)], [0, 1], [False, True], [False, True], [None, 1, 5]
    )


@pytest.mark.parametrize("option", list(average_options()), ids=str)
def test_average_pools_are_exact(option):
    size, kernel, stride, padding, ceil_mode, include_pad, divisor = option
    if len(size) == 1:
        pool = nn.AvgPool1d(kernel, stride, padding, ceil_mode, include_pad)
    else:
        pool = nn.AvgPool2d(kernel, stride, padding, ceil_mode, include_pad, divisor)
    lipschitz, norm = bounds_of(pool, (2, *size), 3.0)
    truth = matrix_norm(pool, size)
    assert truth <= lipschitz <= truth * (1 + 1e-8)
    assert norm == pytest.approx(3 * lipschitz, rel=1e-12)


@pytest.mark.parametrize("size", [(5, 7), (8, 6), (1, 9)])
@pytest.mark.parametrize("output", [1, 2, (3, 4), (None, 2), (7, 11)])
def test_adaptive_averages_are_exact(size, output):
    pool = nn.AdaptiveAvgPool2d(output)
    truth = matrix_norm(pool, size)
    for model in (pool, Forward(lambda m, x: F.adaptive_avg_pool2d(x, output))):
        lipschitz, _ = bounds_of(model, (2, *size))
        most = rounding((matrix_of(pool, size) != 0).sum(1).max())
        assert truth <= lipschitz <= truth * most * (1 + 1e-8)


@pytest.mark.parametrize("length", [1, 5, 9])
@pytest.mark.parametrize("output", [1, 2, 4, 11])
def test_adaptive_averages_along_one_axis(length, output):
    pool = nn.AdaptiveAvgPool1d(output)
    truth = matrix_norm(pool, (length,))
    lipschitz, _ = bounds_of(pool, (3, length))
    most = rounding((matrix_of(pool, (length,)) != 0).sum(1).max())
    assert truth <= lipschitz <= truth * most * (1 + 1e-8)


@pytest.mark.parametrize(
    ("option", "size"),
    [
        ({"kernel_size": 2, "ceil_mode": True, "count_include_pad": False}, (5, 5)),
        ({"kernel_size": 3, "stride": 3, "padding": 1, "count_include_pad": False}, (7, 7)),
        ({"kernel_size": 2, "divisor_override": 1}, (6, 6)),
    ],
)
def test_the_textbook_form_of_average_pooling_is_false(option, size):
    """sqrt(ceil(k/s)^2) / k per image, which counts overlaps and divides by the window's full size."""
    kernel = option["kernel_size"]
    stride = option.get("stride", kernel)
    textbook = math.ceil(kernel / stride) / kernel
    pool = nn.AvgPool2d(**option)
    assert matrix_norm(pool, size) > textbook * 1.01
    assert bounds_of(pool, (1, *size))[0] >= matrix_norm(pool, size)


def test_large_pools_are_bounded_without_their_matrix():
    length, kernel, stride = 40_000, 400, 160
    out = (length - kernel) // stride + 1
    assert length * out > LARGEST_MATRIX
    large = _average_axis(length, kernel, stride, 0, False, True, False)
    small = _average_axis(4_000, kernel, stride, 0, False, True, False)
    assert small <= large <= 1.2 * small  # norms grow with the length: the small one is exact


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_of_large_matrices_holds_for_small_ones(seed, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 12, (), generator=generator))
    windows = torch.zeros(int(torch.randint(1, 8, (), generator=generator)), size, dtype=torch.float64)
    for row in windows:
        low = int(torch.randint(0, size, (), generator=generator))
        high = int(torch.randint(low + 1, size + 1, (), generator=generator))
        row[low:high] = float(torch.rand((), generator=generator))
    exact, *_ = _along(size, lambda line: line @ windows.T)
    assert exact == pytest.approx(float(torch.linalg.matrix_norm(windows, 2)))
    monkeypatch.setattr("lipdp_lightning.bounds.rules.pooling.LARGEST_MATRIX", 0)
    assert exact <= _along(size, lambda line: line @ windows.T)[0] * SLACK


def reads(pool, size):
    """Root of the largest number of windows whose maximum one bright pixel is: a column of a Jacobian."""
    peaks = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, 1, *size) - 1.0
    return math.sqrt(float((pool(peaks) == 0).flatten(1).sum(1).max()))


def rounded(measured):
    return measured * rounding(round(measured**2))


MAX_OPTIONS = [
    option
    for option in itertools.product([1, 2, 3, 4], [1, 2, 3], [0, 1], [1, 2, 3], [False, True])
    if 2 * option[2] <= option[0]
]


@pytest.mark.parametrize("option", MAX_OPTIONS, ids=str)
def test_max_pools_are_never_exceeded(option):
    kernel, stride, padding, dilation, ceil_mode = option
    size = (13, 11)
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    lipschitz, norm = bounds_of(pool, (1, *size), 2.0)
    measured = reads(pool, size)
    assert rounded(measured) == pytest.approx(lipschitz, rel=1e-12)
    assert norm == pytest.approx(2 * measured)
    for x in starts((1, *size), 2.0, count=3, seed=sum(option)):
        assert float(pool(x[None]).norm()) <= norm * SLACK
    flat = nn.MaxPool1d(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    assert rounded(reads(flat, (13,))) == pytest.approx(bounds_of(flat, (1, 13))[0], rel=1e-12)


def test_the_textbook_overlap_of_max_pooling_is_false_with_dilation():
    kernel, stride, dilation = 3, 2, 2
    pool = nn.MaxPool2d(kernel, stride, 1, dilation)
    assert reads(pool, (13, 13)) > math.ceil(kernel / stride)
    assert bounds_of(pool, (1, 13, 13))[0] == pytest.approx(rounded(3.0), rel=1e-12)


def test_max_pool_jacobian_and_output_at_searched_inputs():
    pool = nn.MaxPool2d(3, 2, 1)
    lipschitz, norm = bounds_of(pool, (1, 5, 5), 2.0)
    worst = max(jacobian_norm(pool, x) for x in starts((1, 5, 5), 2.0))
    assert worst <= lipschitz * SLACK
    assert 0.95 * norm <= largest_output(pool, (1, 5, 5), 2.0) <= norm * SLACK


@pytest.mark.parametrize("output", [1, 2, (3, 4), (7, 5)])
def test_adaptive_max_pools(output):
    pool = nn.AdaptiveMaxPool2d(output)
    for model in (pool, Forward(lambda m, x: F.adaptive_max_pool2d(x, output))):
        lipschitz, _ = bounds_of(model, (1, 5, 7))
        assert 0.7 * lipschitz <= reads(pool, (5, 7)) <= lipschitz * SLACK


def test_a_window_of_padding_alone_is_refused():
    """torch answers -inf there, which no norm bounds."""
    pool = nn.MaxPool1d(2, 1, 1, dilation=3)
    assert float(pool(torch.ones(1, 1, 2))) == -math.inf
    with pytest.raises(CertificationError, match="padding alone"):
        certify(pool, (1, 2), 1.0, "binary_cross_entropy")


FUNCTIONS = {
    "max_pool2d": (nn.MaxPool2d(3, 2, 1), [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: torch.max_pool2d(x, 3, 2, 1),
                   lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1, ceil_mode=False)]),
    "max default stride": (nn.MaxPool2d(2), [lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, (2, 2))]),
    "avg_pool2d": (nn.AvgPool2d(3, 1, 1, count_include_pad=False), [
                   lambda x: F.avg_pool2d(x, 3, 1, 1, False, False),
                   lambda x: F.avg_pool2d(x, kernel_size=3, stride=1, padding=1, count_include_pad=False)]),
    "adaptive": (nn.AdaptiveAvgPool2d(1), [lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: x.mean((2, 3), keepdim=True)]),
    "adaptive max": (nn.AdaptiveMaxPool2d(1), [lambda x: F.adaptive_max_pool2d(x, (1, 1)),
    lambda x: x.amax((2, 3), True)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_forms_certify_like_the_module(name):
    module, functions = FUNCTIONS[name]
    expected = bounds_of(module, (2, 6, 7), 1.5)
    for function in functions:
        found = bounds_of(Forward(lambda m, x, function=function: function(x)), (2, 6, 7), 1.5)
        assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.MaxPool1d(3, 2), lambda x: F.max_pool1d(x, 3, 2)),
        (nn.MaxPool1d(2), lambda x: torch.max_pool1d(x, 2)),
        (nn.AvgPool1d(3, 2, 1), lambda x: F.avg_pool1d(x, kernel_size=3, stride=2, padding=1)),
        (nn.AdaptiveAvgPool1d(3), lambda x: F.adaptive_avg_pool1d(x, 3)),
        (nn.AdaptiveMaxPool1d(3), lambda x: F.adaptive_max_pool1d(x, output_size=3)),
    ],
)
def test_functional_forms_along_one_axis(module, function):
    assert bounds_of(Forward(lambda m, x: function(x)), (2, 8)) == pytest.approx(bounds_of(module, (2, 8)), rel=1e-12)


class First(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x)[0]


@pytest.mark.parametrize(
    "model",
    [First(nn.MaxPool2d(2, return_indices=True)), First(nn.AdaptiveMaxPool2d(2, return_indices=True)),
     Forward(lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0]), nn.LPPool2d(2, 2),
     nn.FractionalMaxPool2d(2, output_size=2), Forward(lambda m, x: F.lp_pool2d(x, 2, 2))],
)  # fmt: skip
def test_pools_without_a_rule_are_refused(model):
    with pytest.raises(CertificationError, match="rule"):
        certify(model, (2, 6, 6), 1.0, "binary_cross_entropy")


def test_an_image_without_channels_is_refused():
    with pytest.raises(CertificationError, match="pooling over 2 axes"):
        certify(nn.MaxPool2d(2), (6, 6), 1.0, "binary_cross_entropy")
