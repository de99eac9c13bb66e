"""Rows that are appended to a sample change nothing of what is released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import fit, make_module, make_plan, weights
from torch import Tensor, nn

from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.callbacks import AugmentationMultiplicity
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.mechanism.allocation import NoiseBudget
from lipdp_lightning.mechanism.radii import Radii, Radius
from lipdp_lightning.training import PrivateModule, private_steps
from lipdp_lightning.training.batches import padding_multiple, with_empty_rows


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), MaxMin(), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(24, 3))


class WithoutSlices(PrivateModule):
    """Broken on purpose: the empty rows have labels and a loss."""

    def _summed_loss(self, x: Tensor, y: Tensor, private: Any) -> Tensor:
        multiple = self.rows_to_multiple_of
        return super()._summed_loss(with_empty_rows(x, multiple), with_empty_rows(y, multiple), private)


def trained(monkeypatch: Any, multiple: int, kind: type[PrivateModule] = PrivateModule, **options: Any) -> Tensor:
    monkeypatch.setattr(private_steps, "padding_multiple", lambda *_: multiple)
    sizes: list[int] = []
    module = make_module(network=network(), kind=kind)

    def look(network: nn.Module, inputs: tuple[Tensor]) -> None:
        if network.training:  # and not where set-up tries a step
            sizes.append(len(inputs[0]))

    module.network.register_forward_pre_hook(TrustedHook(look))
    callbacks = [AugmentationMultiplicity(2, [nn.Identity()])] if options.pop("views", False) else []
    more = {"physical_batch_size": options.pop("physical_batch_size", None)}
    fit(make_plan(noise_multiplier=0.0, **options), *callbacks, module=module, **more)
    assert len(sizes) >= 12 and all(size % multiple == 0 for size in sizes)
    return weights(module)


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": "joint"},
        {"scaling": "joint", "physical_batch_size": 7},
        {"scaling": "layerwise", "loss_clip": 0.3},
        {"scaling": "worst_case"},
        {"scaling": "exact", "radius": 0.1},
        {"scaling": "exact_layerwise", "radius": 0.1},
        {"scaling": "batch_max"},
        {"scaling": "exact", "radius": 0.1, "views": True},
    ],
    ids=str,
)
def test_empty_rows_contribute_nothing(monkeypatch: Any, options: dict[str, Any]) -> None:
    plain = trained(monkeypatch, 1, **options)
    torch.testing.assert_close(trained(monkeypatch, 8, **options), plain, atol=1e-6, rtol=0)


def test_the_comparison_notices_a_loss_of_empty_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr("lipdp_lightning.training.model_checks.FIXED_METHODS", ())
    plain = trained(monkeypatch, 1, scaling="joint")
    broken = trained(monkeypatch, 8, WithoutSlices, scaling="joint")
    assert (broken - plain).abs().max() > 1e-2


def test_only_examples_vote_on_a_radius() -> None:
    scaling = Radius(NoiseBudget(1.0, "global", 4), Radii({"0": 1.0}, 0.5, 10.0))
    scaling.begin_pass(3)
    scaling._factors("0", torch.tensor([0.5, 2.0, 3.0, 0.0, 0.0]))
    assert scaling.take_votes(torch.device("cpu")).item() == 1 - 3 / 2


def test_an_empty_batch_stays_empty_and_others_are_rounded_up() -> None:
    assert len(with_empty_rows(torch.ones(0, 3), 8)) == 0
    assert with_empty_rows(torch.ones(8, 3), 8).shape == (8, 3)
    padded = with_empty_rows(torch.ones(9, 3), 8)
    assert padded.shape == (16, 3) and padded[9:].eq(0).all() and padded[:9].eq(1).all()


def test_samples_of_convolutional_networks_have_few_sizes() -> None:
    torch.manual_seed(0)
    for expected in (64, 256, 1024, 4096):
        multiple = padding_multiple(nn.Conv2d(1, 1, 3), expected)
        sizes = torch.poisson(torch.full((1000,), float(expected)))
        padded = (sizes / multiple).ceil() * multiple
        assert len(padded.unique()) < 20 < len(sizes.unique())
        assert padded.mean() < expected * (1 + 0.35 / expected**0.5)
    assert padding_multiple(nn.Linear(3, 3), 1024) == 1 and padding_multiple(nn.Conv2d(1, 1, 3), 2) == 1
    assert padding_multiple(nn.Conv2d(1, 1, 3), 256, views=3) % 3 == 0
