"""Scattering features: shape, one example at a time, the constants of the wavelet transform, and their name."""

from __future__ import annotations

import copy

import pytest
import torch

from lipdp_lightning.features import Scattering


def images(count: int, *shape: int) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("shape", "scales", "order"), [((1, 8, 8), 2, 2), ((3, 8, 16), 1, 2), ((2, 8, 8), 2, 1)])
def test_shape_and_independence_of_the_examples(shape: tuple[int, ...], scales: int, order: int) -> None:
    extractor = Scattering(shape, J=scales, L=4, max_order=order, log_offset=None)
    x = images(3, *shape)
    features = extractor(x)
    paths = 1 + 4 * scales + (16 * scales * (scales - 1) // 2 if order == 2 else 0)
    assert extractor.feature_shape == (shape[0] * paths, shape[1] // 2**scales, shape[2] // 2**scales)
    assert features.shape == (3, *extractor.feature_shape) and features.dtype == torch.float32
    torch.testing.assert_close(features[1:2], extractor(x[1:2]))
    # every channel by itself
    torch.testing.assert_close(
        extractor(x.roll(1, dims=1)), features.unflatten(1, (shape[0], -1)).roll(1, 1).flatten(1, 2)
    )
    assert extractor(x[:0]).shape == (0, *extractor.feature_shape)
    assert extractor.double()(x.double()).dtype == torch.float64


def test_coefficients_are_those_on_record() -> None:
    """Another implementation, or another version of the package, has to give these."""
    x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).square()
    found = Scattering((1, 8, 8), J=2, L=4, log_offset=None)(x).flatten()
    first = [0.04744992, 0.06498623, 0.31264412, 0.3605322, 0.00915097, 0.01104076]
    torch.testing.assert_close(found[:6], torch.tensor(first))
    torch.testing.assert_close(found[40:43], torch.tensor([0.00294617, 0.00300697, 0.00304595]))
    assert float(found.sum()) == pytest.approx(1.7029165, rel=1e-5)


def test_a_constant_image_has_its_mean_and_no_waves() -> None:
    extractor = Scattering((1, 16, 16), J=2, L=4, log_offset=None)
    features = extractor(torch.full((1, 1, 16, 16), 0.7))[0]
    # kymatio's averaging filter sums to 1 - 3e-5
    torch.testing.assert_close(features[0], torch.full((4, 4), 0.7), rtol=1e-4, atol=0)
    assert float(features[1:].abs().max()) < 1e-4


def test_the_logarithm_is_that_of_the_coefficients() -> None:
    x = images(2, 1, 8, 8)
    plain, logged = (Scattering((1, 8, 8), L=2, log_offset=o)(x) for o in (None, 0.05))
    torch.testing.assert_close(logged, torch.log(plain.clamp_min(0) + 0.05))


def test_identity_tells_apart_what_decides_the_output_and_nothing_else() -> None:
    first = Scattering((1, 8, 8), L=2)
    others = [
        Scattering((1, 8, 16), L=2), Scattering((1, 8, 8), L=3), Scattering((1, 8, 8), J=1, L=2),
        Scattering((1, 8, 8), L=2, max_order=1), Scattering((1, 8, 8), L=2, log_offset=0.02),
    ]  # fmt: skip
    assert len({e.identity() for e in (first, *others)}) == 6
    again = Scattering((1, 8, 8), L=2)
    again(images(2, 1, 8, 8))
    assert again.identity() == first.identity() == copy.deepcopy(first).train().identity()
    with torch.no_grad():
        next(again.buffers()).add_(1e-3)
    assert again.identity() != first.identity()


@pytest.mark.parametrize(
    "options",
    [
        {"input_shape": (8, 8)}, {"input_shape": (1, 4, 4), "J": 3}, {"input_shape": (1, 8, 8), "J": 0},
        {"input_shape": (1, 8, 8), "max_order": 3}, {"input_shape": (1, 8, 8), "log_offset": 0.0},
        {"input_shape": (0, 8, 8)},
    ],
)  # fmt: skip
def test_what_has_no_scattering_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        Scattering(**options)


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"was given \(1, 9, 9\).*HINT"):
        Scattering((1, 8, 8), L=2)(torch.zeros(1, 1, 9, 9))
