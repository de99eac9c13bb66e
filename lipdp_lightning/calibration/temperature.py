"""Implements temperature scaling: all logits are divided by one positive number (Guo et al. 2017).

Scaling changes no ranking of classes and no accuracy. The temperature is chosen to make the negative log-likelihood of
given rows small:

* `fit_temperature`: the minimum, for rows that are public;
* `private_temperature`: for private rows, one of a public grid, by an epsilon-DP selection.

The selection works as follows. A row's loss at temperature T_j is min(-log p_y, C), with a public C. Its contribution
to the utility of T_j is C / 2 minus that, rounded to a multiple of 2^-16, so it lies in [-C/2, C/2] whatever the row
holds, rows without a finite output included. Adding or removing a row moves every utility by at most C / 2, replacing
one by at most C: that is the sensitivity of `lipdp_lightning.curves.discrete_noise.permute_and_flip` (McKenna and
Sheldon 2020), which is epsilon-DP and computed exactly on integers. The constant C / 2 is the same for all T_j, and
changes no preference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from lipdp_lightning.calibration.probabilities import class_labels, log_probabilities
from lipdp_lightning.curves.discrete_noise import NoiseSource, permute_and_flip
from lipdp_lightning.curves.releases import CurveRelease, check_privacy

SMALLEST, LARGEST = 1 / 32, 32.0
GRID = tuple(2.0 ** (step / 8) for step in range(-32, 33))  # 1/16 to 16
UNIT = 1 << 16


def losses_at(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Returns -log softmax(logits / temperature)_y of every row, in float64."""
    log_p = log_probabilities(logits, temperature)
    return -log_p.gather(1, class_labels(labels, log_p.shape[1]).unsqueeze(1)).squeeze(1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Returns the temperature in [1/32, 32] of least mean loss; the loss is convex in 1 / temperature.

    It is not private and is for public rows. A result at an end of the range means that the optimum lies beyond it.
    """
    if not len(labels):
        raise ValueError("a temperature cannot be fitted to no rows. HINT: give public_data with held-out rows.")

    def objective(log_temperature: float) -> float:
        return float(losses_at(logits, labels, math.exp(log_temperature)).mean())

    if not math.isfinite(objective(0.0)):
        raise ValueError(
            "a row's loss is not finite, so that no temperature can be fitted. HINT: the model may have diverged."
        )
    bounds = (math.log(SMALLEST), math.log(LARGEST))
    found = minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    return math.exp(min((float(found.x), *bounds), key=objective))


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    found = tuple(sorted(set(map(float, grid))))
    if not found or not all(t > 0 and math.isfinite(t) for t in found):
        raise ValueError(f"temperatures {list(found)} are not all positive and finite. HINT: use [0.5, 1, 2, 4].")
    return found


def default_largest_loss(classes: int) -> float:
    """Returns C, four times the loss of a guess among the classes."""
    return 4 * math.log(classes)


def utilities(logits: Tensor, labels: Tensor, grid: Sequence[float], largest_loss: float) -> list[int]:
    """Returns per temperature the sum over rows of C / 2 - min(loss, C) in units of 2^-16; a row adds at most C / 2 to
    it.
    """
    most = half_range(largest_loss)
    found = []
    for temperature in grid:
        losses = torch.nan_to_num(losses_at(logits, labels, temperature), nan=math.inf, posinf=math.inf)
        units = ((largest_loss / 2 - losses.clamp(0.0, largest_loss)) * UNIT).round().long().clamp(-most, most)
        found.append(int(units.sum()))
    return found


def half_range(largest_loss: float) -> int:
    """Returns C / 2 in units of 2^-16."""
    return math.ceil(largest_loss / 2 * UNIT)


def private_temperature(
    logits: Tensor,
    labels: Tensor,
    epsilon: float,
    source: NoiseSource,
    adjacency: str,
    grid: Sequence[float] = GRID,
    largest_loss: float | None = None,
) -> tuple[float, CurveRelease]:
    """Returns a temperature of the public grid, epsilon-DP in the rows, and its booking.

    The logits of a row may depend on that row and on public or already released values alone.

    Args:
        logits: the class scores of the private rows.
        labels: their labels.
        epsilon: the epsilon of the selection.
        source: the source of the noise.
        adjacency: `replace_one` or `add_remove`.
        grid: the public temperatures to choose from.
        largest_loss: the public bound C on a row's loss; by default four times the loss of a guess.

    Raises:
        ValueError: if the grid, the bound or the privacy is not valid.
    """
    check_privacy(epsilon, 0.0, adjacency)
    temperatures = check_grid(grid)
    classes = 2 if logits.dim() < 2 or logits.shape[1] == 1 else logits.shape[1]
    bound = default_largest_loss(classes) if largest_loss is None else float(largest_loss)
    if not (bound > 0 and math.isfinite(bound)):
        raise ValueError(f"largest_loss {bound} is not positive and finite. HINT: leave it out for 4 log(classes).")
    sensitivity = half_range(bound) * (1 if adjacency == "add_remove" else 2)
    chosen = permute_and_flip(source.stream(), utilities(logits, labels, temperatures, bound), sensitivity, epsilon)
    text = (
        f"permute-and-flip over {len(temperatures)} temperatures, losses clipped to [0, {bound:.4g}], "
        f"sensitivity {sensitivity / UNIT:.4g}"
    )
    return temperatures[chosen], CurveRelease("temperature", text, epsilon, 0.0, adjacency)
