"""Parameter counts that the papers print, reached exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lipdp_lightning.models import PublishedConvNet, ShallowVGG, WideResNet


@pytest.mark.parametrize(
    ("build", "shape", "parameters", "trained_layers"),
    [
        (lambda: PublishedConvNet("mnist_83k"), (1, 28, 28), 83_154, 3),  # 000, table 4: 3 layers
        (lambda: PublishedConvNet("fashion_133k"), (1, 28, 28), 132_746, 6),  # 000, table 4: 6 layers
        (lambda: PublishedConvNet("thesis_1626k"), (1, 28, 28), 1_625_866, 4),  # 004, table 5.3
        (ShallowVGG, (3, 32, 32), 131_466, 5),  # 000, table 4, which counts 6
        (lambda: WideResNet(depth=40, width=4), (3, 32, 32), 8_944_266, 41),  # 004, table 5.3
        (lambda: WideResNet(depth=16, width=4), (3, 32, 32), 2_747_530, 17),  # 004's text says 8,944,266
    ],
)
def test_parameter_counts(
    build: Callable[[], nn.Module], shape: tuple[int, ...], parameters: int, trained_layers: int
) -> None:
    torch.manual_seed(0)
    network = build()
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert sum(isinstance(m, nn.Linear | nn.Conv2d) for m in network.modules()) == trained_layers
    with torch.no_grad():
        assert network(torch.zeros(1, *shape)).shape[0] == 1


def test_group_normalisation_adds_no_parameters() -> None:
    plain, normalised = (PublishedConvNet("fashion_133k", norm_groups=n) for n in (0, 8))
    assert [p.shape for p in plain.parameters()] == [p.shape for p in normalised.parameters()]


def test_unknown_names_and_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="HINT: use one of mnist_83k"):
        PublishedConvNet("lenet")
    with pytest.raises(ValueError, match="HINT: use one of max"):
        PublishedConvNet("mnist_83k", pooling_name="median")
    with pytest.raises(ValueError, match="HINT: use larger images"):
        PublishedConvNet("fashion_133k", (1, 8, 8))
    with pytest.raises(ValueError, match="is not an image"):
        ShallowVGG((32, 32))
