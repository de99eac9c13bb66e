"""A release in pieces has the bits of a release by way of one vector, and every entry has a draw of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_step import Harness, make_plan, random_batch
from torch import Tensor, nn

from lipdp_lightning.mechanism.flat import FlatGradients, Release, Segments
from lipdp_lightning.mechanism.mechanism import Mechanism
from lipdp_lightning.mechanism.noise import NoiseSource
from lipdp_lightning.mechanism.noisy_sums import NoisySums
from lipdp_lightning.mechanism.place import Place
from lipdp_lightning.privacy import normals
from lipdp_lightning.privacy.normals import Array
from lipdp_lightning.privacy.randomness import CounterStream

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


class ForgetsThePlace(Release):
    """Adds every piece where the first one belongs."""

    def complete(self, start: int, noise: Array, deviation: float) -> None:
        super().complete(0, noise, deviation)


def draws(kind: type[Release], threads: int) -> Tensor:
    """Gradients of zero after a release with deviation 1."""
    parameters = [nn.Parameter(torch.zeros(n)) for n in (70_001, 1, 0, 199_998)]
    release = kind(FlatGradients(parameters), {}, 1.0, 1.0)
    request = 0, [p.numel() for p in parameters], 0, 1, "distributed", bytes(32)
    source = NoiseSource(SECRET, threads=threads)
    source.visit(*request, lambda start, piece: release.complete(start, piece, 1.0))  # type: ignore[arg-type]
    release.end()
    return torch.cat([p.grad for p in parameters])  # type: ignore[misc]


def test_every_entry_has_one_draw_of_its_own() -> None:
    expected = NoiseSource(SECRET).draw(0, [70_001, 1, 0, 199_998], 0, 1, "distributed", bytes(32), [1.0] * 4)
    for threads in (1, 3):
        assert torch.equal(draws(Release, threads), expected.float())
    assert not torch.equal(draws(ForgetsThePlace, 1), expected.float())


def test_pieces_are_held_one_at_a_time() -> None:
    """The memory of a piece is used again: nothing as long as the vector is ever allocated."""
    seen: list[tuple[int, int]] = []
    count = 5 * normals.CHUNK + 3
    CounterStream(bytes(32)).visit_normals(count, lambda start, piece: seen.append((start, piece.ctypes.data)))
    assert [start for start, _ in seen] == list(range(0, count, normals.CHUNK))
    assert len({place for _, place in seen}) == 1


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


def test_segments_cover_every_position_once() -> None:
    sizes = [3, 0, 5, 1]
    segments = Segments(sizes)
    owner = [0, 0, 0, 2, 2, 2, 2, 2, 3]
    for start in range(10):
        for stop in range(start, 10):
            found = [index for index, first, last in segments.within(start, stop) for _ in range(first, last)]
            assert found == owner[start:stop]
