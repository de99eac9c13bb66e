"""Norms of weights that change from step to step: followed by the norm of the change, exact when that has grown.

Let W0 be an earlier weight whose norm was evaluated, and f the product of all radial scalings since. Then for the
present weight W

    norm(W)  <=  f norm(W0) + k s(W - f W0),

with k the operator's deviation factor: 1 for a dense layer, kappa for a convolution. Without kappa this
is false for kernels. The last term is bounded by strips of rows (strips.py), for all weights at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsBytes

import torch
from torch import Tensor

from .operators import NormSource, Operator, frobenius_norm
from .strips import Bounds, Reference, changes

SLACK = 0.1
"""A bound may be this much above the last exact norm; it then is about 6 % above it on average. Half of it costs two to
five times as much work per step, double saves a quarter."""


class Follower(NormSource):
    """Serves a Certifier, and a projection, whose weights change in place from step to step.

    Guarantee: every norm it gives is an upper bound on that of the weight as it was when the walk began, or when the
    projection left it. What it remembers is kept by the name of a weight, and every bound is measured from the values
    of the weight: another tensor under the same name, a write through ``.data``, or requests in another order change
    how much work is done, and never whether a bound holds.

    ``measure`` bounds all weights that were asked about before, and the norms of vectors, in one sweep. Of each weight
    it keeps one copy. Where bounds have drifted by ``slack``, the norms are evaluated, and the present weight becomes
    the reference. Norms that are cheap are evaluated in every walk.
    """

    def __init__(self, slack: float = SLACK) -> None:
        if not (math.isfinite(slack) and slack >= 0.0):
            raise ValueError(f"slack={slack} must be finite and not negative.\nHINT: 0.05 allows bounds 5 % high.")
        self._slack = slack
        self._weights: dict[str, Tensor] = {}
        self._operators: dict[str, tuple[Operator, ...]] = {}
        self._references: dict[str, Reference] = {}
        self._asked: dict[int, Tensor] = {}  # vectors of the present walk, and then of the last one
        self._bounds: dict[str, Bounds] = {}  # of the weights as they were measured last
        self._vectors: dict[int, tuple[Tensor, float]] = {}
        self._sealed: tuple[SupportsBytes, dict[str, Bounds], dict[int, tuple[Tensor, float]]] = b"", {}, {}

    # ---- what rules ask

    def begin(self, state: SupportsBytes = b"") -> None:
        known, bounds, vectors = self._sealed
        if state and (state is known or bytes(state) == bytes(known)):  # bytes() may wait for a device
            self._bounds, self._vectors = dict(bounds), dict(vectors)
        else:
            self.measure()
        self._asked = {}

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        if self._weights.get(name) is not weight or operator not in self._operators[name]:
            self._weights[name] = weight
            self._operators[name] = tuple(dict.fromkeys((*self.operators_of(name), operator)))
            self._bounds.pop(name, None)
            self._sealed[1].pop(name, None)
        return self._now(name).norms[operator]

    def frobenius_norm(self, name: str, weight: Tensor) -> float:
        return self._now(name).frobenius if self._weights.get(name) is weight else frobenius_norm(weight)

    def vector_norm(self, vector: Tensor) -> float:
        self._asked[id(vector)] = vector
        if id(vector) not in self._vectors:
            self._vectors[id(vector)] = vector, changes([], vectors=[vector])[1][0]
        return self._vectors[id(vector)][1]

    # ---- what a projection asks

    def operators_of(self, name: str) -> tuple[Operator, ...]:
        """Returns the operators that a weight was asked about; none for a weight that was never asked about."""
        return self._operators.get(name, ())

    def weight_of(self, name: str) -> Tensor:
        """Returns the weight that was last asked about under this name."""
        return self._weights[name]

    def bound(self, name: str) -> float:
        """Returns an upper bound on the norms of all operators of a weight, as they were measured last."""
        return max(self._now(name).norms.values())

    def measure(self) -> None:
        """Bounds everything that was asked about, by the values as they are now; the host waits once.

        It waits again, once for all weights, where bounds have drifted too far.
        """
        vectors = list(self._asked.values())
        followed = [name for name in self._weights if self._usable(name)]
        moved, norms = changes([(self._weights[n], self._references[n]) for n in followed], vectors)
        self._vectors = {id(vector): (vector, norm) for vector, norm in zip(vectors, norms, strict=True)}
        self._bounds, drifted = {}, []
        for name, change in zip(followed, moved, strict=True):
            bounds = self._references[name].followed(change)
            if self._references[name].within(bounds, self._slack):
                self._bounds[name] = bounds
            elif math.isfinite(change.frobenius):  # otherwise an error names the weight, if it is asked about
                drifted.append(name)
        if drifted:
            self.renew(drifted)

    def renew(self, names: Sequence[str], cheap_too: bool = False) -> None:
        """Evaluates the norms of weights, which become references unless their norms are cheap, or with these too."""
        held = _on_host([self._weights[name] for name in names])
        sizes = [frobenius_norm(values) for values in held]
        for name, values, size in zip(names, held, sizes, strict=True):
            norms, factors, costly = {}, {}, False
            for operator in self._operators[name]:
                norm, factors[operator] = operator.norm(values, name), operator.deviation_factor(values)
                costly = costly or not operator.is_cheap(self._weights[name])
                if not 0.0 <= norm < math.inf:
                    raise ValueError(
                        f"{name}: its certified norm is {norm}, so no sensitivity follows from it.\n"
                        "HINT: lower the learning rate, or restore the last finite checkpoint."
                    )
                norms[operator] = norm
            self._bounds[name] = Bounds(norms, factors, size)
            self._references.pop(name, None)
            if costly or cheap_too:  # a copy, which stays as it is
                now = self._weights[name].detach().clone(memory_format=torch.contiguous_format)
                self._references[name] = Reference(now, self._bounds[name])

    @torch.no_grad()
    def clip_(self, limits: Mapping[str, float]) -> None:
        """Scales weights down, in place, whose bounds exceed their limits; the bounds are then at most the limits.

        Norms are evaluated no more often than for a certificate, so that a weight may end up to ``slack`` below its
        limit. The rounding of the scaled weight is part of the bound.
        """
        if wrong := [f"{name}: a norm cannot be at most {limit}" for name, limit in limits.items() if not limit > 0.0]:
            raise ValueError("; ".join(wrong) + ".\nHINT: give a positive limit.")
        self.renew([name for name in limits if name not in self._bounds])
        factors = {}
        for name, limit in limits.items():
            if max(self._bounds[name].norms.values()) > limit:
                factors[name], self._bounds[name] = self._bounds[name].scaled_within(self._weights[name], limit)
        if factors:
            torch._foreach_mul_([self._weights[name] for name in factors], list(factors.values()))
        for name in factors.keys() & self._references.keys():
            earlier = self._references[name]
            self._references[name] = replace(earlier, factor=earlier.factor * factors[name])

    def seal(self, state: SupportsBytes, named: Mapping[str, Tensor]) -> None:
        """Keeps the present bounds for a walk over the tensors ``named``, all of whose bits the state names."""
        covered = {id(tensor) for tensor in named.values()}
        bounds = {name: now for name, now in self._bounds.items() if named.get(name) is self._weights[name]}
        self._sealed = state, bounds, {key: now for key, now in self._vectors.items() if key in covered}

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Returns all that later bounds depend on besides the weights, as plain tensors, numbers and text.

        A run that is resumed with it computes the same bits as one that was not interrupted. Its tensors never change.
        """
        state, sealed, _ = self._sealed
        anchors = {
            name: {"reference": one.values, "factor": one.factor} | _plain(one.bounds)
            for name, one in self._references.items()
        }
        bounds = {name: _plain(now) for name, now in sealed.items()}
        return {"anchors": anchors, "digest": bytes(state).hex(), "sealed": bounds}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a saved ``state``; the weights must have been asked about before.

        Entries for other weights or operators are ignored, and norms that have no entry are evaluated.
        """
        if state is None or "anchors" not in state:
            return
        self._references = {}
        for name, saved in state["anchors"].items():
            if (bounds := self._restored(name, saved)) is not None:
                values = saved["reference"].to(self._weights[name].device)
                self._references[name] = Reference(values, bounds, saved["factor"])
        sealed = {name: self._restored(name, saved) for name, saved in state["sealed"].items()}
        known = {name: bounds for name, bounds in sealed.items() if bounds is not None}
        self._sealed = bytes.fromhex(state["digest"]), known, {}

    def _restored(self, name: str, saved: Mapping[str, Any]) -> Bounds | None:
        operators = self.operators_of(name)
        if not operators or "frobenius" not in saved or any(repr(o) not in saved["norms"] for o in operators):
            return None
        return Bounds.of(self._weights[name], {o: saved["norms"][repr(o)] for o in operators}, saved["frobenius"])

    # ---- inside

    def _usable(self, name: str) -> bool:
        earlier = self._references.get(name)
        return (
            earlier is not None
            and earlier.fits(self._weights[name])
            and len(earlier.bounds.norms) == len(self._operators[name])
        )

    def _now(self, name: str) -> Bounds:
        """Returns the bounds of a weight as it was measured last, or as it is if that has not been done."""
        if name not in self._bounds:
            self.renew([name])
        return self._bounds[name]


def _on_host(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the weights, or copies of them, for which the host waits once."""
    if all([weight.is_cpu for weight in weights]):
        return [weight.detach() for weight in weights]
    copies = torch.cat([weight.detach().flatten() for weight in weights]).cpu().split([w.numel() for w in weights])
    return [copy.view(weight.shape).to(weight.dtype) for copy, weight in zip(copies, weights, strict=True)]


def _plain(bounds: Bounds) -> dict[str, Any]:
    norms = {repr(operator): norm for operator, norm in bounds.norms.items()}
    return {"norms": norms, "frobenius": bounds.frobenius}
