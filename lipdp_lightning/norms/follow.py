"""Norms of weights that change from step to step: followed by the norm of the change, exact when that has grown.

Let W0 be an earlier weight whose norm was evaluated, and f the product of all radial scalings since. Then for the
present weight W

    norm(W)  <=  f norm(W0) + k s(W - f W0),

with k the operator's deviation factor: 1 for a dense layer, kappa for a convolution (operators.py). Without kappa this
is false for kernels. The last term is bounded by strips of rows (strips.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .dense import frobenius_norm
from .operators import NormSource, Operator
from .strips import TALL_STRIP, Change, Reference, changes

SLACK = 0.1
"""A bound may be this much above the last exact norm; it then is about 6 % above it on average. Half of it costs two to
five times as much work per step, double saves a quarter."""

_TALL_SHARE = 0.6  # of the slack: where tall strips leave less of it, they would be needed again at once
_ABOVE = 1.0 + 2.0**-40


@dataclass(frozen=True)
class Anchor:
    """An earlier weight, and upper bounds on the norms of its operators before they were scaled with it.

    ``exact`` are the norms evaluated last, from which the slack counts. ``norms`` are those of the reference, which may
    have been followed to it from an earlier one.
    """

    reference: Reference
    exact: Mapping[Operator, float]
    norms: Mapping[Operator, float]

    def followed(self, weight: Tensor, change: Change) -> dict[Operator, float]:
        """Returns upper bounds on the norms of a weight that is within ``change`` of the reference."""
        factor = self.reference.factor
        return {
            operator: (factor * norm + operator.deviation_factor(weight) * change.spectral) * _ABOVE
            for operator, norm in self.norms.items()
        }

    def within(self, norms: Mapping[Operator, float], slack: float) -> bool:
        """Tells whether bounds have drifted by no more than ``slack``; NaN has drifted."""
        factor = self.reference.factor
        return all(norm <= (1.0 + slack) * factor * self.exact[operator] for operator, norm in norms.items())

    def scaled(self, factor: float) -> Anchor:
        return replace(self, reference=replace(self.reference, factor=self.reference.factor * factor))


@dataclass(frozen=True)
class Measured:
    """Upper bounds on the norms of one weight's operators, and on its own Frobenius norm."""

    norms: Mapping[Operator, float]
    frobenius: float

    def scaled_within(self, weight: Tensor, limit: float) -> tuple[float, Measured]:
        """Returns a factor by which the stored weight may be multiplied to be within a limit, and what then holds.

        Rounding counts: that of the factor to the weight's precision, and that of each product.
        """
        information = torch.finfo(weight.dtype)
        rounding = information.eps * (1.0 + 2.0**-20) * self.frobenius
        lost = information.smallest_normal * math.sqrt(weight.numel())
        terms = [(o, norm, o.deviation_factor(weight)) for o, norm in self.norms.items()]
        factor = min(max(0.0, limit - k * lost) / (norm + k * rounding) for _, norm, k in terms) * (1.0 - 2.0**-50)
        norms = {o: min(limit, (factor * (norm + k * rounding) + k * lost) * _ABOVE) for o, norm, k in terms}
        return factor, Measured(norms, (factor * (self.frobenius + rounding) + lost) * _ABOVE)


class Follower(NormSource):
    """Serves a Certifier, and a projection, whose weights change in place from step to step.

    Guarantee: every norm it gives is an upper bound on that of the weight as it was when the walk began, or when the
    projection left it. What it remembers is kept by the name of a weight, and every bound is measured from the values
    of the weight: another tensor under the same name, a write through ``.data``, or requests in another order change
    how much work is done, and never whether a bound holds.

    Of each weight it keeps one copy. Norms that are cheap are taken anew each time. Others are followed by the strip
    bound until they have drifted by ``slack``. Tall strips may then show that the norm moved less, and the present
    weight becomes the reference; else the norm is evaluated.
    """

    def __init__(self, slack: float = SLACK) -> None:
        if not (math.isfinite(slack) and slack >= 0.0):
            raise ValueError(f"slack={slack} must be finite and not negative.\nHINT: 0.05 allows bounds 5 % high.")
        self._slack = slack
        self._weights: dict[str, Tensor] = {}
        self._operators: dict[str, tuple[Operator, ...]] = {}
        self._anchors: dict[str, Anchor] = {}
        self._measured: dict[str, Measured] = {}
        self._cheap: dict[str, tuple[Tensor, Measured]] = {}  # norms that are taken anew, while a weight stays as it is
        self._sealed: tuple[bytes, dict[str, Measured]] = b"", {}
        self._asked: dict[int, Tensor] = {}
        self._vectors: dict[int, tuple[Tensor, float]] = {}

    # ---- what rules ask

    def begin(self, digest: bytes = b"") -> None:
        known, sealed = self._sealed
        self._measured = dict(sealed) if digest and digest == known else self._within_slack()
        vectors, self._asked = list(self._asked.values()), {}
        norms = _vector_norms(vectors)
        self._vectors = {id(vector): (vector, norm) for vector, norm in zip(vectors, norms, strict=True)}

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        if self._weights.get(name) is not weight or operator not in self._operators[name]:
            self._weights[name] = weight
            self._operators[name] = tuple(dict.fromkeys((*self.operators_of(name), operator)))
            self._measured.pop(name, None)
        return self._now(name).norms[operator]

    def vector_norm(self, vector: Tensor) -> float:
        self._asked[id(vector)] = vector
        found = self._vectors.get(id(vector))
        return _vector_norms([vector])[0] if found is None else found[1]

    # ---- what a projection asks

    def operators_of(self, name: str) -> tuple[Operator, ...]:
        """Returns the operators that a weight was asked about; none for a weight that was never asked about."""
        return self._operators.get(name, ())

    def weight_of(self, name: str) -> Tensor:
        """Returns the weight that was last asked about under this name."""
        return self._weights[name]

    def measure(self) -> None:
        """Bounds what follows by the weights as they are now, and not as they were when the last walk began."""
        self._measured = self._within_slack()

    def bound(self, name: str) -> float:
        """Returns an upper bound on the norms of all operators of a weight, as they were measured last."""
        return max(self._now(name).norms.values())

    @torch.no_grad()
    def clip_(self, name: str, limit: float) -> None:
        """Scales a weight down, in place, if its bound exceeds a limit; the bound is then at most the limit.

        Norms are evaluated no more often than for a certificate, so that a weight may end up to ``slack`` below its
        limit. The rounding of the scaled weight is part of the bound.
        """
        if not limit > 0.0:
            raise ValueError(f"{name}: a norm cannot be at most {limit}.\nHINT: give a positive limit.")
        if self.bound(name) > limit:
            weight = self._weights[name]
            factor, self._measured[name] = self._now(name).scaled_within(weight, limit)
            weight.mul_(factor)
            if name in self._anchors:
                self._anchors[name] = self._anchors[name].scaled(factor)

    def settle(self, name: str, norm: float) -> None:
        """Takes over ``norm`` as an upper bound on the norms of all operators of a weight as it is now."""
        self._measured[name] = self._anchored(name, dict.fromkeys(self._operators[name], norm))

    def seal(self, digest: bytes, named: Mapping[str, Tensor]) -> None:
        """Keeps the present bounds for a walk over the weights ``named``, all of whose bits the digest names."""
        held = {name: now for name, now in self._measured.items() if named.get(name) is self._weights[name]}
        self._sealed = digest, held

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Returns all that later bounds depend on besides the weights, as plain tensors, numbers and text.

        With it an interrupted run goes on bit for bit. Tensors in it never change in place.
        """
        digest, sealed = self._sealed
        anchors = {
            name: {"reference": a.reference.values, "factor": a.reference.factor, "exact": _texts(a.exact),
                   "norms": _texts(a.norms)}
            for name, a in self._anchors.items()
        }  # fmt: skip
        bounds = {name: {"norms": _texts(m.norms), "frobenius": m.frobenius} for name, m in sealed.items()}
        return {"anchors": anchors, "digest": digest.hex(), "sealed": bounds}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes on as the follower did that gave ``state``. The weights must have been asked about before.

        What the state says of other weights or operators is left out, and what it does not say is evaluated.
        """
        if state is None or "anchors" not in state:
            return
        self._anchors = {}
        for name, saved in state["anchors"].items():
            exact, norms = self._known(name, saved["exact"]), self._known(name, saved["norms"])
            if norms and exact.keys() == norms.keys():
                values = saved["reference"].to(self._weights[name].device)
                reference = Reference(values, frobenius_norm(values), saved["factor"])
                self._anchors[name] = Anchor(reference, exact, norms)
        sealed = {
            name: Measured(norms, saved["frobenius"])
            for name, saved in state["sealed"].items()
            if (norms := self._known(name, saved["norms"]))
        }
        self._sealed = bytes.fromhex(state["digest"]), sealed

    def _known(self, name: str, values: Mapping[str, float]) -> dict[Operator, float]:
        return {operator: values[repr(operator)] for operator in self.operators_of(name) if repr(operator) in values}

    # ---- inside

    def _now(self, name: str) -> Measured:
        found = self._measured.get(name)
        if found is None:
            found = self._measured[name] = self._renewed(name)
        return found

    def _within_slack(self) -> dict[str, Measured]:
        """Returns the bounds of all weights that are followed, are not cheap, and have not drifted too far."""
        followed = [(name, weight, anchor) for name, weight in self._weights.items() if (anchor := self._usable(name))]
        moved = changes([(weight, anchor.reference) for _, weight, anchor in followed])
        found = {}
        for (name, weight, anchor), change in zip(followed, moved, strict=True):
            norms = anchor.followed(weight, change)
            if anchor.within(norms, self._slack):
                size = anchor.reference.factor * anchor.reference.frobenius + change.frobenius
                found[name] = Measured(norms, size * _ABOVE)
        return found

    def _usable(self, name: str) -> Anchor | None:
        weight, anchor, operators = self._weights[name], self._anchors.get(name), self.operators_of(name)
        if anchor is None or not anchor.reference.fits(weight) or len(anchor.norms) < len(operators):
            return None
        return anchor

    def _renewed(self, name: str) -> Measured:
        """Returns the bounds of a weight that the strip bound does not serve."""
        weight, anchor = self._weights[name], self._usable(name)
        cheap = self._cheap.get(name)
        if cheap is not None and cheap[1].norms.keys() == {*self._operators[name]} and _equal(cheap[0], weight):
            return cheap[1]
        if anchor is not None and not all(operator.is_quick(weight) for operator in anchor.norms):
            change = changes([(weight, anchor.reference)], min(TALL_STRIP, len(weight)))[0]
            closer = anchor.followed(weight, change)
            if anchor.within(closer, _TALL_SHARE * self._slack):
                exact = {operator: anchor.reference.factor * norm for operator, norm in anchor.exact.items()}
                return self._anchored(name, closer, exact)
        norms = self._evaluated(name)
        if all(operator.is_cheap(weight) for operator in norms):
            self._anchors.pop(name, None)
            found = Measured(norms, frobenius_norm(weight))
            self._cheap[name] = weight.detach().clone(), found
            return found
        return self._anchored(name, norms)

    def _evaluated(self, name: str) -> dict[Operator, float]:
        """Returns the norms of a weight's operators from its values: at first as closely as possible, later cheaply."""
        weight, anchor = self._weights[name].detach(), self._anchors.get(name)
        known = {} if anchor is None else anchor.norms
        unmoved = anchor is not None and anchor.reference.is_equal(weight)
        norms = {}
        for operator in self.operators_of(name):
            if operator in known and unmoved:
                norms[operator] = known[operator]
                continue
            norm = (operator.close_norm if operator in known else operator.norm)(weight, name)
            if not (math.isfinite(norm) and norm >= 0.0):
                raise ValueError(
                    f"{name}: its certified norm is {norm}, so no sensitivity follows from it.\n"
                    "HINT: lower the learning rate, or restore the last finite checkpoint."
                )
            norms[operator] = norm
        return norms

    def _anchored(
        self, name: str, norms: Mapping[Operator, float], exact: Mapping[Operator, float] | None = None
    ) -> Measured:
        """Makes the present weight the reference, and ``norms`` the bounds on those of its operators."""
        weight = self._weights[name]
        values = weight.detach().clone(memory_format=torch.contiguous_format)
        reference = Reference(values, frobenius_norm(values))
        self._anchors[name] = Anchor(reference, norms if exact is None else exact, norms)
        return Measured(norms, reference.frobenius)


def _equal(kept: Tensor, weight: Tensor) -> bool:
    """Returns whether two tensors are the same numbers; never with a NaN."""
    alike = kept.shape == weight.shape and kept.dtype == weight.dtype and kept.device == weight.device
    return alike and bool(torch.equal(kept, weight.detach()))


def _texts(values: Mapping[Operator, float]) -> dict[str, float]:
    return {repr(operator): value for operator, value in values.items()}


def _vector_norms(vectors: Sequence[Tensor]) -> list[float]:
    """Returns upper bounds on the norms of vectors; NaN propagates. The host waits once."""
    if not vectors:
        return []
    norms = torch._foreach_norm([vector.detach() for vector in vectors], 2, dtype=torch.float64)
    values = torch.stack(list(norms)).tolist()
    return [norm * (1.0 + (v.numel() + 16) * 2.0**-52) for norm, v in zip(values, vectors, strict=True)]
