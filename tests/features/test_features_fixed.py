"""Gabor and patch features: fixed, public, per example, and the same wherever they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lipdp_lightning.features import (
    Deskewed,
    FeatureExtractor,
    Gabor,
    MirroredScattering,
    Patches,
    Scattering,
    Whitened,
)
from lipdp_lightning.features.deskewed import deskew
from lipdp_lightning.features.gabor import gabor_bank

SMALL = {"filters": 16, "pool": 2}


def extractors() -> list[FeatureExtractor]:
    return [
        Gabor((1, 28, 28)),
        Gabor((3, 16, 16), filters=32, size=16, groups=4),
        Patches((1, 12, 12), **SMALL),
        Patches((3, 14, 14), mirror=True, low=-1.0, shrink=2, **SMALL),
        Deskewed(Gabor((1, 28, 28))),
        Whitened(Patches((1, 12, 12), **SMALL), components=20, crops=80),
    ]


@pytest.mark.parametrize("index", range(6))
def test_features_of_an_example_depend_on_it_alone(index: int) -> None:
    extractor = extractors()[index]
    x = torch.rand(20, *extractor.input_shape, dtype=torch.float64)
    together = extractor(x)
    assert together.shape == (20, *extractor.feature_shape) and together.isfinite().all()
    alone = torch.cat([extractor(x[i : i + 1]) for i in range(20)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
    assert not list(extractor.parameters())


@pytest.mark.parametrize("index", range(6))
def test_constant_images_have_finite_features(index: int) -> None:
    extractor = extractors()[index]
    for value in (0.0, 1.0):
        assert extractor(torch.full((2, *extractor.input_shape), value)).isfinite().all()


@pytest.mark.parametrize("index", range(6))
def test_made_again_it_is_the_same(index: int) -> None:
    assert extractors()[index].identity() == extractors()[index].identity()


def test_identities_tell_settings_apart() -> None:
    shape = (1, 12, 12)
    made = [
        Patches(shape, **SMALL, **changed)
        for changed in ({}, {"seed": 1}, {"threshold": 0.5}, {"mirror": True}, {"high": 2.0}, {"shrink": 2, "size": 4})
    ]
    assert len({extractor.identity() for extractor in (*made, Gabor(shape), Gabor(shape, stride=1))}) == 8


def test_patches_of_a_mirror_image() -> None:
    """The filters' symmetry gives the average over an image and its mirror image without a second pass."""
    x = torch.rand(3, 1, 15, 15, dtype=torch.float64)
    plain, mirrored = (Patches((1, 15, 15), mirror=mirror, filters=16, pool=4) for mirror in (False, True))
    assert mirrored.feature_shape == (16, 4, 4) and plain.feature_shape == (32, 4, 4)
    torch.testing.assert_close(mirrored(x.flip(3)), mirrored(x), rtol=1e-6, atol=1e-9)
    average = ((plain(x).square() + plain(x.flip(3)).square()) / 2).sqrt()
    first_half = torch.cat([torch.arange(8), 16 + torch.arange(8)])
    torch.testing.assert_close(mirrored(x), average[:, first_half], rtol=1e-5, atol=1e-6)


def test_patches_ignore_brightness() -> None:
    extractor = Patches((1, 12, 12), **SMALL)
    x = 0.5 * torch.rand(4, 1, 12, 12, dtype=torch.float64)
    torch.testing.assert_close(extractor(x), extractor(x + 0.3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"J": 3, "L": 4}, {"L": 6, "max_order": 1}])
def test_partners_are_the_coefficients_of_the_mirror_image(options: dict[str, Any]) -> None:
    """Averaged over places, the mirror image's coefficients are the partners' of the image."""
    noise = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(noise, 32, mode="bicubic")
    plain = Scattering((1, 32, 32), log_offset=None, **options)
    mirrored = MirroredScattering((1, 32, 32), log_offset=None, **options)
    channels, height, width = plain.feature_shape
    assert mirrored.feature_shape == (channels, height, width // 2)
    own, turned = plain(x).mean((2, 3))[:, 1:], plain(x.flip(3)).mean((2, 3))[:, 1:]
    partners = mirrored.partners[1:] - 1
    right, wrong = ((turned - other).norm() / own.norm() for other in (own[:, partners], own))
    assert right < 0.1 and right < 0.8 * wrong
    averaged = (plain(x) + plain(x)[:, mirrored.partners].flip(3)) / 2
    torch.testing.assert_close(mirrored(x), averaged[..., : width // 2])
    torch.testing.assert_close(averaged[:, mirrored.partners].flip(3), averaged)  # the right half repeats the left


def test_mirrored_scattering_needs_halves() -> None:
    with pytest.raises(ValueError, match=r"7 columns.*HINT"):
        MirroredScattering((1, 28, 28))


def whitened(**options: Any) -> Whitened:
    return Whitened(Patches((3, 14, 14), low=-1.0, **SMALL), crops=100, low=-1.0, **options)


def test_components_of_the_crops_have_the_variances_of_the_formula() -> None:
    """Uncorrelated over all places, and each with eigenvalue / (eigenvalue / mean + floor) ** power."""
    variances = {}
    for power in (0.0, 0.6, 1.0):
        extractor = whitened(power=power, floor=0.01)
        components = extractor(extractor._crops()).double().transpose(0, 1).flatten(1)
        assert components.mean(1).abs().max() < 1e-4 * components.std()
        covariance = components @ components.T / components.shape[1]
        variances[power] = covariance.diagonal()
        assert (covariance - variances[power].diag()).abs().max() < 1e-4 * variances[power].max()
    values = variances[0.0]
    assert (values.diff() < 1e-6).all() and values[0] > 50 * values[-1]  # the largest first
    for power in (0.6, 1.0):
        expected = values * (values / values.mean() + 0.01) ** -power
        torch.testing.assert_close(variances[power], expected, rtol=1e-3, atol=1e-6)


def test_components_at_power_zero_are_a_rotation_and_fewer_are_the_first_of_them() -> None:
    x = 2 * torch.rand(5, 3, 14, 14) - 1
    turned, some = whitened(power=0.0), whitened(power=0.0, components=7)
    centred = turned.extractor(x) - turned._learned()[0].float()
    torch.testing.assert_close(turned(x).norm(dim=1), centred.norm(dim=1), rtol=1e-4, atol=1e-5)
    assert some.feature_shape == (7, 2, 2)
    torch.testing.assert_close(some(x), turned(x)[:, :7])
    assert whitened().identity() != whitened(seed=1).identity() != whitened(power=0.4).identity()


def test_what_cannot_be_whitened_is_named() -> None:
    with pytest.raises(ValueError, match=r"components=40 of 32 channels(?s:.)*floor=0(?s:.)*crops=1 "):
        Whitened(Patches((1, 12, 12), **SMALL), components=40, floor=0.0, crops=1)
    with pytest.raises(ValueError, match="larger than the photographs"):
        Whitened(Patches((1, 300, 300), **SMALL))


def slanted(slant: float, shift: float = 0.0) -> torch.Tensor:
    """A soft bar, 16 rows high, that moves `slant` columns per row."""
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    bar = torch.exp(-((columns - 13.5 - shift - slant * (rows - 13.5)) ** 2) / 4) * ((rows - 13.5).abs() < 8)
    return bar.double()[None, None]


def test_slanted_strokes_become_upright() -> None:
    upright = slanted(0.0)
    for slant, shift in ((0.4, 0.0), (-0.7, 0.0), (0.3, 2.0)):
        image = slanted(slant, shift)
        assert (deskew(image) - upright).norm() < 0.12 * upright.norm() < 0.3 * (image - upright).norm()
    torch.testing.assert_close(deskew(upright), upright, rtol=1e-5, atol=1e-5)
    # no further than allowed; a black image has no moments
    assert (deskew(slanted(0.8), largest_slant=0.1) - upright).norm() > 0.3 * upright.norm()
    assert deskew(torch.zeros(2, 1, 28, 28)).abs().max() == 0


def test_what_is_deskewed_enters_the_identity() -> None:
    inner = (Gabor((1, 28, 28)), Gabor((1, 28, 28), stride=4))
    made = [*inner, *map(Deskewed, inner), Deskewed(inner[0], largest_slant=0.5)]
    assert len({extractor.identity() for extractor in made}) == 5


def test_gabor_filters_have_mean_zero_and_norm_one() -> None:
    bank = gabor_bank(16, 8, 4).double()
    assert bank.sum((1, 2)).abs().max() < 1e-5
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(16, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    # cosine and sine of one direction, and different directions, are not alike
    products = (bank.flatten(1) @ bank.flatten(1).T - torch.eye(16)).abs()
    assert products.max() < 0.9


def test_gabor_features_are_normalised_per_group() -> None:
    features = Gabor((1, 28, 28))(torch.rand(5, 1, 28, 28)).reshape(5, 16, -1)
    assert features.mean(2).abs().max() < 1e-5 and (features.std(2, unbiased=False) - 1).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (Patches, {"input_shape": (2, 12, 12)}, ["grey or colour"]),
        (Patches, {"filters": 7, "threshold": -1.0, "whitening": 0.0}, ["filters=7", "threshold", "whitening"]),
        (Patches, {"size": 20}, ["does not fit"]),
        (Patches, {"shrink": 3}, ["shrunk by 3"]),
        (Patches, {"pool": 12, "low": 1.0, "high": 0.0}, ["pool=12", "low=1.0"]),
        (Gabor, {"filters": 12, "groups": 5}, ["filters=12", "5 groups"]),
        (Gabor, {"stride": 0}, ["positive whole number"]),
        (lambda input_shape, **o: Deskewed(Gabor((1, 28, 28)), **o), {"largest_slant": -1.0}, ["largest_slant=-1.0"]),
        (Gabor, {"size": 5}, ["size=5"]),
    ],
)
def test_bad_options_are_named_all_at_once(kind: Any, options: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ValueError, match="HINT") as caught:
        kind(**{"input_shape": (1, 12, 12), **options})
    assert all(name in str(caught.value) for name in names)
