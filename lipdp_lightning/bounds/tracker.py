"""Certified norms of many layers, kept valid between exact evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ExactNorm = Callable[[Tensor], float]


@dataclass(frozen=True)
class NormEntry:
    """A weight, the function that certifies its norm from its values, and kappa (1 for a dense layer).

    ``exact_norm`` must return an upper bound on the norm of the operator whose weight it is given;
    ``weight`` is referred to, not copied, and may change in place, in device or in dtype.
    """

    weight: Tensor
    exact_norm: ExactNorm
    kappa: float = 1.0
    name: str = "weight"


def _subnormal_error(weight: Tensor) -> float:
    """Largest Frobenius norm of what underflow can take from a scaled weight."""
    information = torch.finfo(weight.dtype)
    return information.smallest_normal * information.eps * math.sqrt(weight.numel())


class NormTracker:
    """Upper bounds on the norms of a list of weights, exact only when they have to be.

    For an anchor W0 whose norm has been certified, s(W) <= s(W0) + kappa ||W - W0||_F. (Without kappa this is
    false for a convolution: its operator norm moves by up to kappa ||W - W0||_F.) :meth:`update` evaluates
    this for all layers at once and certifies anew those where it exceeds (1 + slack) times the last certified
    value.

    The subtraction is made in the weights' dtype and its Frobenius norm accumulated in float64; the bounds
    are multiplied by 1 + eps(dtype) + (numel + 8) 2^-52, more than the rounding of both. Memory: one copy of
    the weights in their own dtype; an update needs a second one while it runs.
    """

    def __init__(self, entries: Sequence[NormEntry], slack: float = 0.05) -> None:
        if not (math.isfinite(slack) and slack >= 0.0):
            raise ValueError(f"slack={slack} must be finite and not negative.\nHINT: 0.05 allows bounds 5 % high.")
        for entry in entries:
            if not entry.weight.is_floating_point() or not (math.isfinite(entry.kappa) and entry.kappa >= 0.0):
                raise ValueError(
                    f"{entry.name}: dtype {entry.weight.dtype} and kappa={entry.kappa} bound no norm.\n"
                    "HINT: give a real floating-point weight and the kappa of bounds.norms.kappa."
                )
        self.entries = tuple(entries)
        self.slack = slack
        self.refreshes = 0
        self._anchors = [entry.weight.detach().clone() for entry in self.entries]
        self._certified = [math.inf] * len(self.entries)
        self._frobenius = [math.inf] * len(self.entries)
        for index in range(len(self.entries)):
            self.refresh(index)

    @torch.no_grad()
    def refresh(self, index: int) -> float:
        """Certify one weight from its present values and make it the anchor."""
        entry = self.entries[index]
        norm = float(entry.exact_norm(entry.weight.detach()))
        if not (math.isfinite(norm) and norm >= 0.0):
            raise ValueError(
                f"{entry.name}: its certified norm is {norm}, so no sensitivity follows from it.\n"
                "HINT: lower the learning rate, or restore the last finite checkpoint."
            )
        self._anchors[index] = entry.weight.detach().clone()
        frobenius = float(torch.linalg.vector_norm(self._anchors[index].flatten(), dtype=torch.float64))
        self._frobenius[index] = frobenius * self._margin(index)
        self._certified[index] = norm
        self.refreshes += 1
        return norm

    def _margin(self, index: int) -> float:
        anchor = self._anchors[index]
        return 1.0 + torch.finfo(anchor.dtype).eps + (anchor.numel() + 8) * 2.0**-52

    @torch.no_grad()
    def _deviations(self) -> list[float]:
        """Upper bounds on ||W - W0||_F, infinite where the weight changed device or dtype; one host sync."""
        same = [
            i
            for i, (entry, anchor) in enumerate(zip(self.entries, self._anchors, strict=True))
            if entry.weight.device == anchor.device and entry.weight.dtype == anchor.dtype
        ]
        deviations = [math.inf] * len(self.entries)
        if not same:
            return deviations
        weights = [self.entries[i].weight.detach() for i in same]
        differences = torch._foreach_sub(weights, [self._anchors[i] for i in same])
        norms = torch._foreach_norm(differences, 2, dtype=torch.float64)
        device = norms[0].device
        values = torch.stack([norm.to(device) for norm in norms]).tolist()
        for index, value in zip(same, values, strict=True):
            deviations[index] = value * self._margin(index)
        return deviations

    def _bounds_and_deviations(self) -> tuple[list[float], list[float]]:
        bounds: list[float] = []
        deviations = self._deviations()
        for index, deviation in enumerate(deviations):
            certified = self._certified[index]
            bound = certified
            if deviation != 0.0:
                bound = math.nextafter(certified + self.entries[index].kappa * deviation, math.inf)
            if not bound <= (1.0 + self.slack) * certified:  # so written that NaN refreshes, and is refused there
                exact = self.refresh(index)
                deviations[index] = 0.0
                bound = min(bound, exact) if math.isfinite(bound) else exact
            bounds.append(bound)
        return bounds, deviations

    def update(self) -> list[float]:
        """Upper bounds on the norms of all weights as they are now."""
        return self._bounds_and_deviations()[0]

    @torch.no_grad()
    def rescale(self, index: int, factor: float) -> None:
        """Tell the tracker that the weight was multiplied in place by ``factor`` >= 0 (a radial projection).

        The anchor is multiplied too. Its rounding costs kappa eps(dtype) ||W0||_F (half for the product, half
        because torch first rounds the factor), which is added to the certified value: negligible in float32,
        soon a refresh in bfloat16.
        """
        if not (math.isfinite(factor) and factor >= 0.0):
            raise ValueError(f"factor={factor} is no radial scaling.\nHINT: it must be finite and not negative.")
        anchor = self._anchors[index].mul_(factor)
        scaled = factor * self._frobenius[index]
        rounding = torch.finfo(anchor.dtype).eps * scaled + _subnormal_error(anchor)
        norm = factor * self._certified[index] + self.entries[index].kappa * rounding
        self._frobenius[index] = (scaled + rounding) * (1.0 + 2.0**-50)
        self._certified[index] = norm * (1.0 + 2.0**-50)

    @torch.no_grad()
    def clip(self, max_norms: Sequence[float | None]) -> list[float]:
        """Scale down, in place, every weight whose bound exceeds its maximum; return the bounds afterwards.

        None leaves a weight free. Each returned bound is at most its maximum: the factor allows for the
        rounding of the scaled weight. Exact norms are evaluated only as often as :meth:`update` does, so a
        weight may end up to ``slack`` below its maximum. A later :meth:`update` may report a few units in the
        last place above the maximum: its bound pays for the rounding of the anchor too.
        """
        if len(max_norms) != len(self.entries) or any(m is not None and not m > 0.0 for m in max_norms):
            raise ValueError(
                f"max_norms={list(max_norms)} for {len(self.entries)} weights.\n"
                "HINT: one positive maximum per weight, None for a free one."
            )
        bounds, deviations = self._bounds_and_deviations()
        for index, (bound, maximum) in enumerate(zip(bounds, max_norms, strict=True)):
            if maximum is None or bound <= maximum:
                continue
            entry = self.entries[index]
            frobenius = self._frobenius[index] + deviations[index]  # ||W||_F <= ||W0||_F + ||W - W0||_F
            rounding = torch.finfo(entry.weight.dtype).eps * frobenius
            reachable = max(0.0, maximum - entry.kappa * _subnormal_error(entry.weight))
            factor = reachable / (bound + entry.kappa * rounding) * (1.0 - 2.0**-50)
            entry.weight.mul_(factor)
            self.rescale(index, factor)
            bounds[index] = maximum
        return bounds
