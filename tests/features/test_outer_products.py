"""Pooled outer products: what they are of one patch, that examples do not mix, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lipdp_lightning.features import OuterProducts
from lipdp_lightning.features.outer_products import cosine_patterns


def test_one_patch_gives_the_products_of_its_coefficients() -> None:
    """With one position in one cell, the features are the signed roots of products of two coefficients."""
    extractor = OuterProducts((1, 4, 4), frequencies=2, size=4, stride=8, cells=1)
    x = torch.randn(3, 1, 4, 4)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))[:, 0, :4, :4].double()
    responses = torch.einsum("jhw,bhw->bj", cosine_patterns(2, 4)[1:], padded)
    products = torch.stack([responses[:, i] * responses[:, j] for i in range(3) for j in range(i, 3)], dim=1)
    expected = products.sign() * products.abs().sqrt()
    torch.testing.assert_close(extractor(x).flatten(1).double(), expected, rtol=1e-4, atol=1e-5)


def test_examples_do_not_mix_and_the_size_is_that_of_all_pairs() -> None:
    extractor = OuterProducts((1, 28, 28))
    x = torch.randn(4, 1, 28, 28)
    assert extractor.feature_shape == (120, 3, 3)
    torch.testing.assert_close(extractor(x)[2:3], extractor(x[2:3]))


@pytest.mark.parametrize("options", [{"frequencies": 1}, {"frequencies": 9}, {"stride": 0}, {"cells": 0}])
def test_what_makes_no_feature_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        OuterProducts((1, 28, 28), **options)
