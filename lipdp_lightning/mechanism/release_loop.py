"""The last step of a release, compiled: noise and sum in float64, rounded once."""

from __future__ import annotations

from typing import Any

from ..compiled import loop


@loop(*(f"void(float64[::1], float64, {dtype}[::1], float64, float64)" for dtype in ("float32", "float64")))
def complete(noise: Any, deviation: float, gradient: Any, share: float, factor: float) -> None:
    """gradient <- (deviation * noise + share * gradient) * factor."""
    for index in range(len(noise)):
        gradient[index] = (deviation * noise[index] + share * gradient[index]) * factor
