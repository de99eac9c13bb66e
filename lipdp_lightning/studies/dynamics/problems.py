"""Defines small regressions that tell the flows of paper 003's table 1 apart: few rows of very different norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...bounds.losses import SquaredError
from ...layers import make_private
from ...models import MLP
from .example_factors import Clipped, Factors, Scaled, Unclipped
from .flow import state_of

ROWS, FEATURES, HIDDEN = 5, 10, (16, 16)
SPREAD = 1.5  # standard deviation of the logarithm of the rows' norms
COMMON = 2.5  # length of the direction that all rows share up to sign; the rest of each row has a length of about 1
# half the squared error, which the balls leave unchanged, since outputs and targets lie well inside
LOSS = SquaredError(output_bound=1000.0, target_bound=1000.0)


@dataclass(frozen=True)
class Problem:
    """A network in float64, rows, targets, and the norm of the longest row."""

    network: nn.Module
    x: Tensor
    y: Tensor
    input_bound: float


def make_problem(seed: int, *, unit_norm: bool = False, hidden: tuple[int, ...] = HIDDEN) -> Problem:
    """Returns rows along a shared direction with either sign, of log-normal norms or all of norm 1, and
    random targets.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = normal(FEATURES)
    own = normal(ROWS, FEATURES) / FEATURES**0.5
    directions = own + COMMON * shared / shared.norm() * torch.sign(normal(ROWS, 1))
    directions = directions / directions.norm(dim=1, keepdim=True)
    x = directions if unit_norm else directions * torch.exp(SPREAD * normal(ROWS, 1))
    y = normal(ROWS, 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = make_private(MLP([FEATURES], 1, hidden, activation_name="tanh", bias=not unit_norm)).double()
    return Problem(network, x, y, float(x.norm(dim=1).max()))


def median_norm(problem: Problem) -> float:
    """Returns the median norm of the examples' gradients at the start."""
    norms = state_of(problem.network, problem.x, problem.y, LOSS).norms
    return float(torch.stack(list(norms.values())).square().sum(0).sqrt().median())


# maps a method to its kernel in the table of the paper
METHODS: dict[str, str] = {
    "no clipping": "H",
    "local clipping, large R": "H",
    "local clipping, small R, flat": "H C",
    "local clipping, small R, layer-wise": "sum H_r C_r",
    "global clipping, large R": "H",
    "global clipping, small R, flat": "H C",
    "global clipping, small R, layer-wise": "sum H_r C_r",
    "automatic clipping, flat": "H C",
    "automatic clipping, layer-wise": "sum H_r C_r",
    "ours: worst_case": "H",
    "ours: joint (default)": "H C",
    "ours: joint, one layer, rows of norm 1": "c H",
    "ours: layerwise": "sum H_r C_r",
    "ours: exact": "H C",
    "ours: exact_layerwise": "sum H_r C_r",
}
SMALL, LARGE = (
    0.3,
    1e6,
)  # radii in units of the median norm at the start; the small one of global clipping is the median


def make_case(method: str, seed: int) -> tuple[Problem, Factors]:
    """Returns the problem of a seed, and the factors of a method on it."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown. HINT: use one of {', '.join(METHODS)}.")
    alone = method == "ours: joint, one layer, rows of norm 1"
    problem = make_problem(seed, unit_norm=alone, hidden=() if alone else HIDDEN)
    typical = median_norm(problem)
    if method.startswith("ours"):
        scaling = method.removeprefix("ours: ").split(" ")[0].strip(",")
        options = {"radius": SMALL * typical} if scaling.startswith("exact") else {}
        return problem, Scaled(problem.network, (FEATURES,), problem.input_bound, LOSS, scaling, options)
    if method == "no clipping":
        return problem, Unclipped()
    kind = method.split(" ")[0]
    share = LARGE if "large R" in method else 1.0 if kind == "global" else SMALL
    assert kind in ("local", "global", "automatic")
    return problem, Clipped(kind, share * typical, layerwise="layer-wise" in method)  # type: ignore[arg-type]
