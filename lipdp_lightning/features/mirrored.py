"""Averages scattering coefficients with their mirror images, which halves their number and all but removes the effect
of mirroring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .scattering import Scattering


class MirroredScattering(Scattering):
    """Averages each coefficient with its partner: the one of the reflected angles, in the reflected column.

    Mirroring an image exchanges partners, up to the place of the sampling grid. After averaging, the right half of the
    columns repeats the left and is dropped: (channels K, height/2^J, width/2^(J+1)). The logarithm is taken after the
    average. This suits pictures in which left and right carry no meaning, such as photographs.

    Args:
        input_shape: (channels, height, width), the width a multiple of 2^(J+1).
        J: number of scales.
        L: number of angles.
        max_order: 1 or 2.
        log_offset: as for Scattering.
        low: smallest value of an input; inputs are mapped to [0, 1] first, so that no coefficient is negative.
        high: largest value of an input.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        J: int = 2,
        L: int = 8,
        max_order: int = 2,
        log_offset: float | None = 0.01,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        if not low < high:
            raise ValueError(
                f"MirroredScattering: low={low} is not below high={high}. HINT: give the range of the inputs."
            )
        self.low, self.high = low, high
        super().__init__(input_shape, J, L, max_order, log_offset)
        channels, height, width = self.feature_shape
        if width % 2:
            raise ValueError(
                f"MirroredScattering: {width} columns of coefficients have no halves. "
                f"HINT: use a width that is a multiple of {2 ** (J + 1)}, or Scattering."
            )
        self.register_buffer("partners", torch.tensor(partners(J, L, max_order)))
        self.freeze((channels, height, width // 2))

    def extract(self, x: Tensor) -> Tensor:
        coefficients = self.transform(((x - self.low) / (self.high - self.low)).contiguous())
        mirrored = coefficients[:, :, self.partners].flip(-1)
        averaged = ((coefficients + mirrored) / 2)[..., : coefficients.shape[-1] // 2].flatten(1, 2)
        return averaged if self.log_offset is None else torch.log(averaged.clamp_min(0) + self.log_offset)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "low": self.low, "high": self.high}


def partners(scales: int, angles: int, max_order: int) -> list[int]:
    """Returns for each coefficient, in kymatio's order, the place of the one with reflected angles."""
    first = [(j, a) for j in range(scales) for a in range(angles)]
    paths: list[tuple[tuple[int, int], ...]] = [(), *((one,) for one in first)]
    if max_order == 2:
        paths += [(one, two) for one in first for two in first if two[0] > one[0]]
    # kymatio's angle number a is (c - a) pi / L with this c; reflection changes its sign, modulo pi
    centre = int(angles - angles / 2 - 1)
    places = {path: place for place, path in enumerate(paths)}
    return [places[tuple((j, (2 * centre - a) % angles) for j, a in path)] for path in paths]
