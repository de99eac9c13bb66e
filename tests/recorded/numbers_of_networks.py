"""Numbers that a rebuilding of the core must not move: certificates, sensitivities, released sums, projections.

``python tests/recorded/numbers_of_networks.py`` writes them anew; ``tests/test_recorded_numbers.py`` compares. Weights
and examples are closed formulas, so that no random generator enters.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent
FILE = FOLDER / "numbers_of_networks.json"
for _place in (FOLDER.parent, FOLDER.parents[1], FOLDER.parent / "models"):  # run as a script, too
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

from private_step import NETWORKS, Harness, make_plan  # noqa: E402
from test_every_model import NETWORKS as MODELS  # noqa: E402

from lipdp_lightning.layers import make_private  # noqa: E402

SCALINGS = ("worst_case", "layerwise", "joint", "radius", "exact", "exact_layerwise")
ALLOCATIONS = ("equal", "global", "optimal")
PROJECTIONS = ("clip", "clip_singular", "fixed", "bjorck", "frobenius")


def waves(count: int, offset: int) -> Tensor:
    """Numbers in [-1, 1] that are the same on every machine up to the last bits."""
    index = torch.arange(count, dtype=torch.float64)
    return torch.sin(index * 1.2345 + 0.37 * offset + index.square() * 0.0011)


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]:
    """Returns the constructor, the input shape and the number of classes of every recorded network."""
    found = {f"test {name}": (build, shape, 5) for name, (build, shape) in NETWORKS.items()}
    return found | {f"model {name}": (build, shape, 4) for name, (build, shape) in MODELS.items()}


def with_given_weights(network: nn.Module) -> nn.Module:
    """Every weight is a wave of norm about 1.5 per matrix, every bias a wave of norm .3; frozen ones stay."""
    network = make_private(network)
    with torch.no_grad():
        for offset, parameter in enumerate(network.parameters()):
            if parameter.requires_grad:
                values = waves(parameter.numel(), offset).reshape(parameter.shape)
                size = 1.5 * math.sqrt(parameter.shape[0]) if parameter.dim() > 1 else 0.3
                parameter.copy_(size * values / values.norm())
    return network


def batch(shape: tuple[int, ...], classes: int, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.stack([waves(math.prod(shape), 100 + i).reshape(shape) for i in range(size)])
    sizes = torch.linspace(0.2, 1.4, size, dtype=torch.float64)
    rows = rows / rows.flatten(1).norm(dim=1).reshape(-1, *(1,) * len(shape))
    rows = (rows * sizes.reshape(-1, *(1,) * len(shape))).float()
    return rows, torch.arange(size) % classes, torch.arange(size)


def described(values: Tensor) -> list[float]:
    """The norm of a vector, and its inner products with two waves."""
    flat = values.detach().double().flatten()
    return [float(flat.norm())] + [float(flat @ waves(len(flat), k)) for k in (7, 8)]


def step_numbers(network: nn.Module, shape: tuple[int, ...], classes: int, scaling: str) -> dict[str, Any]:
    options: dict[str, Any] = {"radius": 0.5} if scaling in ("radius", "exact", "exact_layerwise") else {}
    harness = Harness(network, shape, make_plan(scaling=scaling, max_norm=1.0, **options), input_bound=1.0)
    numbers: dict[str, Any] = {
        "worst_case": harness.mechanism.certificate.sensitivities("worst_case"),
        "layerwise": harness.mechanism.certificate.sensitivities("layerwise"),
        "released": {name: described(v) for name, v in harness.release(batch(shape, classes)).items()},
        "sensitivities": harness.mechanism.sensitivities(),
    }
    return numbers


def allocated(network: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    found = {}
    for allocation in ALLOCATIONS:
        for scaling in ("worst_case", "joint"):
            plan = make_plan(scaling=scaling, allocation=allocation, max_norm=1.0)
            deviations = Harness(network, shape, plan).mechanism.deviations()
            found[f"{allocation}, {scaling}"] = deviations
    return found


def projected(network: nn.Module, shape: tuple[int, ...], kind: str) -> dict[str, list[float]]:
    Harness(network, shape, make_plan(projection=kind, max_norm=0.7))
    return {name: described(p) for name, p in network.named_parameters() if p.requires_grad}


def numbers_of(build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    torch.manual_seed(0)  # for what is frozen at random
    network = with_given_weights(build())
    start = {k: v.clone() for k, v in network.state_dict().items()}
    own: dict[str, Any] = {"steps": {}, "projections": {}}
    for scaling in SCALINGS:
        network.load_state_dict(start)
        own["steps"][scaling] = step_numbers(network, shape, classes, scaling)
    network.load_state_dict(start)
    own["deviations"] = allocated(network, shape)
    for kind in PROJECTIONS:
        network.load_state_dict(start)
        own["projections"][kind] = projected(network, shape, kind)
    return own


def record() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: numbers_of(build, shape, classes) for name, (build, shape, classes) in networks().items()}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}")


if __name__ == "__main__":
    FILE.write_text(json.dumps(rounded(record()), indent=0, sort_keys=True) + "\n", encoding="utf-8")
