"""A release in pieces has the bits of a release by way of one vector, and every entry has a draw of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_step import Harness, make_plan, random_batch
from torch import Tensor, nn

from lipdp_lightning.mechanism.mechanism import Mechanism
from lipdp_lightning.mechanism.noise import NoiseSource
from lipdp_lightning.mechanism.noisy_sums import NoisySums
from lipdp_lightning.mechanism.place import Place
from lipdp_lightning.privacy import normals

SECRET = bytes(range(16))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 300), nn.ReLU(), nn.Linear(300, 5))


def releases(whole: bool, steps: int, **options: Any) -> list[Tensor]:
    """What several steps release, and the tracked radii after them."""
    own = Harness(network(), (12,), make_plan(max_norm=1.0, **options), kind=Mechanism)
    own.mechanism.sums.whole = whole
    found = [
        torch.cat([v.flatten() for v in own.release(random_batch(20, (12,), 5), s).values()]) for s in range(steps)
    ]
    radii = torch.tensor(sorted(own.mechanism.state().values()), dtype=torch.float64)
    own.mechanism.close()
    return [*found, radii]


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": "joint"},
        {"scaling": "exact", "radius": 0.1},
        {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 10.0},
        {"scaling": "layerwise", "secure": True},
    ],
    ids=lambda o: o["scaling"],
)
def test_a_release_in_pieces_has_the_bits_of_one_vector(options: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(normals, "CHUNK", 1000)  # pieces end within layers, and the votes share one with gradients
    for whole, pieces in zip(releases(True, 3, **options), releases(False, 3, **options), strict=True):
        assert torch.equal(whole, pieces)


@pytest.mark.parametrize("deviations", [[1.0, -1.0], [1.0, float("nan")], [1.0]])
def test_noise_that_cannot_be_scaled_is_refused_before_any_is_added(deviations: list[float]) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    sums = NoisySums(parameters, NoiseSource(SECRET), Place())
    sums.begin(0, [3, 3], bytes(32), deviations)
    with pytest.raises(ValueError, match=r"noise deviation|would get no noise"):
        sums.release_(deviations, {}, torch.zeros(0), 1.0, 1.0, None)
    assert all(torch.equal(p.grad, torch.ones(3)) for p in parameters)  # type: ignore[arg-type]
    sums.close()
