"""The factors c_ik that scale each example's gradient, and the sensitivities they leave (guarantee page, 1.4).

A factor is a function of example i and of public numbers, and of no other example: that is what makes it
private. ``batch_max`` breaks this rule, to reproduce thesis Algorithm 8, and is never certified.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import ModuleType

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate
from ..layers.energies import read_by_loops
from ..layers.scaled import ScaledLayer
from .uses import LayerUses

SMALLEST = 1e-12  # keeps an all-zero example's factor finite; its gradient is zero


class Scaling:
    """worst_case: c = 1. Sensitivities are l_k n_k from the forward bounds (papers 000 and 001)."""

    name = "worst_case"
    certified = True
    notes_uses = False  # of layers, to be compared with the certificate's
    joint = False  # one condition for all groups together, met by sigma_k = sigma tau_k reach
    views = 1  # rows per example
    rows: int | None = None  # of the micro-batch that are examples; further ones are empty and follow them
    partial_sums = 0.0  # how far sums of positions may exceed an example's contribution, in sensitivities

    def __init__(self) -> None:
        self.uses = LayerUses()
        self._attached: list[tuple[ScaledLayer, tuple[object, ...]]] = []

    def attach(self, model: nn.Module) -> None:
        """Give every scaled layer its scaler; ``detach`` takes it away."""
        layers = {path: module for path, module in model.named_modules() if isinstance(module, ScaledLayer)}
        for path, layer in layers.items():
            self._attach_to(path, layer)
        self._attached = [(layer, _given_to(layer)) for layer in layers.values()]

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        """Give one layer its scaler."""

    def detach(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, ScaledLayer):
                module.gradient_scaler = module.gradient_keeper = module.use_counter = None
        self._attached = []

    def begin(self, certificate: Certificate, thresholds: Mapping[str, float]) -> None:
        """Take the public numbers of this step."""
        self.uses.begin(certificate)

    def sensitivities(self, certificate: Certificate) -> dict[str, float]:
        return certificate.sensitivities(self.name)

    def reference(self, certificate: Certificate) -> dict[str, float]:
        """What the thresholds tau_k of a joint scaling are allocated from; a group that cannot move has 0."""
        return certificate.sensitivities("worst_case")

    def reach(self, certificate: Certificate, thresholds: Mapping[str, float]) -> float:
        """Bound of sqrt(sum_k ||c_i g_ik||^2 / tau_k^2) under a joint scaling."""
        return 1.0

    def settle(self) -> None:
        """End a micro-batch: before the next forward pass, and before the release.

        Raises ValueError if layers were used otherwise than certified, or scale their gradients otherwise.
        """
        if any([_given_to(layer) != given for layer, given in self._attached]):
            raise ValueError(
                "a layer's gradient_scaler or gradient_keeper was replaced after the mechanism had set it: the "
                "gradients are not scaled as the noise assumes. HINT: leave them to the mechanism."
            )
        if self._attached:
            self.uses.settle()

    def take_sums(self) -> dict[int, Tensor]:
        """The step's sums that are not in ``grad``, by id of the parameter; they are handed over once."""
        self.settle()
        return {}

    def example_factor(self, batch: int, device: torch.device) -> Tensor | None:
        """One factor per example for the whole loss, after the forward pass; None leaves it alone.

        Raises ValueError if the forward pass used layers otherwise than certified.
        """
        self._check_uses()
        return None

    def _check_uses(self) -> None:
        if self.notes_uses and self._attached:
            self.uses.check()


def _given_to(layer: ScaledLayer) -> tuple[object, ...]:
    return layer.gradient_scaler, layer.gradient_keeper, layer.use_counter


class Layerwise(Scaling):
    """c_ik = 1 / max(n_ik, floor): ||c_ik g_ik|| <= l_k, whatever the floor. Thesis Algorithm 8 made sound.

    With a public radius R for the floor this is ``radius``: min(1, R / n) / R = 1 / max(n, R).
    """

    name = "layerwise"
    notes_uses = True

    def __init__(self, floor: float = 0.0) -> None:
        super().__init__()
        self._floor = max(floor, SMALLEST)

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.gradient_scaler = partial(self._scale, path)

    def floor(self, path: str) -> float:
        return self._floor

    def _scale(self, path: str, norms: Tensor) -> Tensor:
        self.uses.note(path)
        return norms.clamp_min(self.floor(path)).reciprocal()


class Radii(Scaling):
    """Public radii R_k: fixed, or each of them tracked by a private quantile of norms, from votes of the examples."""

    def __init__(self, radii: Mapping[str, float]) -> None:
        Scaling.__init__(self)
        self.radii = dict(radii)
        self.below: dict[str, Tensor] = {}
        self.counting = False

    def begin(self, certificate: Certificate, thresholds: Mapping[str, float]) -> None:
        super().begin(certificate, thresholds)
        self.below = {}  # votes of passes outside a step are not part of its release

    def votes_of_one(self, certificate: Certificate) -> dict[str, int]:
        """How often one example votes on each radius."""
        raise NotImplementedError

    def _vote(self, name: str, norms: Tensor) -> None:
        if self.counting:
            norms = norms[: self.rows]
            # sum over examples of +1/2 or -1/2: one vote moves the entry by 1/2
            votes = ((norms <= self.radii[name]).sum() - 0.5 * norms.shape[0]).to(torch.float64)
            self.below[name] = self.below.get(name, torch.zeros_like(votes)) + votes


class Radius(Radii, Layerwise):
    """c_ik = min(1, R_k / n_ik) / R_k."""

    name = "radius"

    def __init__(self, radii: Mapping[str, float]) -> None:
        Radii.__init__(self, radii)

    def floor(self, path: str) -> float:
        return self.radii[path]

    def votes_of_one(self, certificate: Certificate) -> dict[str, int]:
        """One vote at every use of the layer."""
        uses = Counter(use.module for group in certificate.groups for use in group.uses if use.scalable)
        return {path: uses[path] for path in self.radii}

    def _scale(self, path: str, norms: Tensor) -> Tensor:
        self._vote(path, norms)
        return super()._scale(path, norms)


class BatchMax(Scaling):
    """c_k = 1 / max_j n_jk over the private batch: thesis Algorithm 8, line 11. NOT private."""

    name = "batch_max"
    certified = False

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.gradient_scaler = self._scale

    @staticmethod
    def _scale(norms: Tensor) -> Tensor:
        largest = norms.max().clamp_min(SMALLEST) if norms.numel() else norms.new_ones(())
        return norms.new_ones(norms.shape) / largest


class Joint(Scaling):
    """One factor per example, c_i = 1 / sqrt(sum_k (l_k n_ik / tau_k)^2), on the whole loss.

    sum_k ||c_i g_ik||^2 / tau_k^2 <= 1 for every example: certified as a whole, with no sqrt(K) to
    compose, and the gradient keeps its direction. Uses of one group add before they are squared. A
    use that cannot measure n_ik enters with its worst case.
    """

    name = "joint"
    joint = True
    notes_uses = True

    def __init__(self, floor: float = 0.0) -> None:
        super().__init__()
        self._floor = max(floor, SMALLEST)
        self._terms: dict[str, list[tuple[int, float]]] = {}
        self._constants: list[float] = []
        self._calls: dict[str, int] = {}
        self._norms: list[Tensor] = []  # of the uses so far, and the group and the factor of each
        self._uses: list[tuple[int, float]] = []

    def _attach_to(self, path: str, layer: ScaledLayer) -> None:
        layer.gradient_scaler = partial(self._record, path)

    def begin(self, certificate: Certificate, thresholds: Mapping[str, float]) -> None:
        """Prepare, for every use, its group and its factor l / tau; and what unmeasured uses contribute."""
        super().begin(certificate, thresholds)
        self._terms, self._constants = {}, []
        for index, group in enumerate(certificate.groups):
            threshold = thresholds[group.name]
            self._constants.append(0.0)
            for use in group.uses:
                weight = use.cotangent_bound / threshold if threshold > 0 else 0.0
                if use.scalable:
                    self._terms.setdefault(use.module, []).append((index, weight))
                else:
                    self._constants[index] += weight * use.gradient_factor
        self._restart()

    def _restart(self) -> None:
        self._calls, self._norms, self._uses = {}, [], []

    def _record(self, path: str, norms: Tensor) -> None:
        self.uses.note(path)
        call, terms = self._calls.get(path, 0), self._terms.get(path, [])
        if call >= len(terms):
            raise self.uses.refusal(self.uses.seen)
        self._calls[path] = call + 1
        self._uses.append(terms[call])
        self._norms.append(norms)

    def example_factor(self, batch: int, device: torch.device) -> Tensor | None:
        # numbers of the step change every time: compiled into a graph, each step would need another one
        factors = (_apart if torch.compiler.is_compiling() else _now)(self, batch, device)
        self._restart()
        return factors

    def _checked_factors(self, batch: int, device: torch.device) -> Tensor:
        self._check_uses()
        return self._factors(batch, device)

    def _factors(self, batch: int, device: torch.device) -> Tensor:
        if any([norms.shape != (batch,) for norms in self._norms]):
            raise ValueError(
                f"a layer was given {[len(norms) for norms in self._norms]} rows in a batch of {batch} examples, and "
                "their norms cannot be told apart. HINT: keep the batch as the first dimension of every tensor."
            )
        if self._norms and read_by_loops(*self._norms):
            return self._by_loop(batch)
        squares = torch.zeros(batch, device=device)
        for total in self._sums():
            squares = squares + (total * total)
        return squares.sqrt().clamp_min(self._floor).reciprocal()

    def _sums(self) -> list[Tensor | float]:
        """sum_u l_u n_iu / tau_k of every group: its uses add."""
        sums: list[Tensor | float] = list(self._constants)
        for (index, weight), norms in zip(self._uses, self._norms, strict=True):
            sums[index] = sums[index] + norms * weight
        return sums

    def _by_loop(self, batch: int) -> Tensor:
        factors = torch.empty(batch, dtype=torch.float32)
        places = array("q", [norms.data_ptr() for norms in self._norms])
        groups, weights = array("q", [g for g, _ in self._uses]), array("d", [w for _, w in self._uses])
        constants, floor = array("d", self._constants), array("d", [self._floor])
        joint_loop().joint_factors.at(
            1, *places.buffer_info(), *weights.buffer_info(), *groups.buffer_info(), *constants.buffer_info(),
            *floor.buffer_info(), factors.data_ptr(), batch,
        )  # fmt: skip
        return factors


def _now(scaling: Joint, batch: int, device: torch.device) -> Tensor:
    return scaling._checked_factors(batch, device)


_apart: Callable[..., Tensor] = torch.compiler.disable(_now)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def joint_loop() -> ModuleType:
    """Compiled when it is asked for first."""
    from . import joint_loop

    return joint_loop


def quantile_step(radius: float, share_below: float, quantile: float, rate: float = 0.2) -> float:
    """Geometric update of a tracked radius towards the quantile, from a noisy share: post-processing."""
    return radius * math.exp(-rate * (min(1.0, max(0.0, share_below)) - quantile))
