"""Projections of weights onto norm balls, and standardisation of kernels.

All change a weight in place. The radius is met by the values as stored in the weight's dtype: the weight is computed in
float64, rounded, certified again, and scaled down by a few units in the last place until the certificate of the stored
values is within it. In training, :class:`Clip` goes by the bound that is followed instead (``norms.follow``).

No guarantee of privacy depends on this module: it computes with released weights alone, and the mechanism evaluates the
norms of what it leaves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from .norms.dense import as_float64, rounding_margin, spectral_norms
from .norms.operators import Operator

_ATTEMPTS = 64
_INSIDE = 1.0 - 2.0**-40
"""Part of the radius that spectral norms are kept to, so that another order of evaluation is within it too."""


@dataclass(frozen=True)
class _Uses(Operator):
    """All operators that one weight defines, as one: their norms are bounded together."""

    operators: tuple[Operator, ...]
    groups: int

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        return max(operator.norm(weight, name) for operator in self.operators)

    def deviation_factor(self, weight: Tensor) -> float:
        return max(operator.deviation_factor(weight) for operator in self.operators)


def together(operators: tuple[Operator, ...]) -> Operator:
    """Returns one operator whose norm bounds those of all operators that a weight defines."""
    return operators[0] if len(operators) == 1 else _Uses(operators, operators[0].groups)


@dataclass(frozen=True)
class Projection(ABC):
    """The projection of one layer: the kind is the class, ``max_norm`` the radius."""

    max_norm: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_norm) and self.max_norm > 0.0):
            raise ValueError(
                f"max_norm={self.max_norm} is not a radius: a projection needs a finite positive one.\n"
                "HINT: use a value near 1, or leave the layer free."
            )

    @abstractmethod
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        """Projects the weight in place; returns an upper bound on the operator's norm afterwards."""


class Clip(Projection):
    """Scales the weight down to norm <= max_norm, if it is above (ClipWeights of Barczewski & Ramon 2024).

    It is radial: the direction is kept. This is not the Euclidean projection onto the spectral ball, and projected
    gradient descent with it may stop at a point that is not an optimum; see :class:`ClipSingular`.
    """

    @torch.no_grad()
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        norm = operator.norm(weight)
        return norm if norm <= self.max_norm else _scaled_to(weight, norm, self.max_norm, operator)


class Fixed(Projection):
    """Scales the weight, up or down, to norm = max_norm (Fix-Lip-DP-SGD of Barczewski & Ramon 2024).

    The CERTIFIED norm becomes max_norm up to a few units in the last place of the dtype, from below; the norm itself is
    lower by the slack of the operator's bound. A zero weight has no direction: it is left at zero.
    """

    @torch.no_grad()
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        norm = operator.norm(weight)
        return 0.0 if norm == 0.0 else _scaled_to(weight, norm, self.max_norm, operator)


class ClipSingular(Projection):
    """Projects onto {s(weight as a matrix) <= max_norm / kappa}: larger singular values are cut to that.

    For a dense layer this is the Euclidean projection onto the spectral ball. For a convolution the matrix is
    c_out x (c_in k_h k_w), per group, and s(conv) <= kappa s(matrix) <= max_norm; the set is convex but smaller than
    {s(conv) <= max_norm}, so that a kernel may be changed though its own norm is within max_norm.
    """

    @torch.no_grad()
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        blocks, within = _blocks(weight, operator.groups), _matrix_norm(operator.groups)
        radius = self.max_norm / operator.deviation_factor(weight) * _INSIDE
        if within(weight) > radius:
            left, values, right = torch.linalg.svd(blocks, full_matrices=False)
            target = (left * values.clamp_max(radius)[..., None, :]) @ right
            _store_within(weight, target.reshape(weight.shape), radius, within)
        return min(operator.norm(weight), self.max_norm)


@dataclass(frozen=True)
class Bjorck(Projection):
    """Drives the singular values of the weight as a matrix towards max_norm by Bjorck-Bowie iteration.

    The matrix is first divided by a certified norm, so that its singular values lie in [0, 1]; each step maps
    s to s (3 - s^2) / 2, which keeps [0, 1] (and maps [0, 2] into [-1, 1]), so one certificate serves any
    number of steps. Afterwards s(matrix) <= max_norm: the norm is <= max_norm for a dense layer but only
    <= kappa max_norm for a convolution, and that is what is certified. A zero weight stays zero.
    """

    steps: int = 12

    @torch.no_grad()
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        blocks = _blocks(weight, operator.groups)
        norms = spectral_norms(blocks)[:, None, None]
        blocks = blocks / torch.where(norms > 0, norms, torch.ones_like(norms))
        wide = blocks.shape[-2] < blocks.shape[-1]
        for _ in range(self.steps):
            cubic = (blocks @ blocks.mT) @ blocks if wide else blocks @ (blocks.mT @ blocks)
            blocks = 1.5 * blocks - 0.5 * cubic
        target = self.max_norm * blocks.reshape(weight.shape)
        norm = _store_within(weight, target, self.max_norm * _INSIDE, _matrix_norm(operator.groups))
        return min(operator.norm(weight), operator.deviation_factor(weight) * norm)


class Frobenius(Projection):
    """Projects onto {||W||_F <= max_norm}, the kernel of a convolution taken as it is.

    s(W) <= ||W||_F bounds a dense layer by max_norm and a convolution by kappa max_norm only.
    """

    @torch.no_grad()
    def apply_(self, weight: Tensor, operator: Operator) -> float:
        margin = rounding_margin(weight.shape[0], weight[0].numel())  # that of a spectral norm is within it then

        def within(stored: Tensor) -> float:
            return float(torch.linalg.vector_norm(as_float64(stored).flatten())) * margin

        norm = within(weight)
        if norm > self.max_norm:
            target = as_float64(weight) / norm * self.max_norm
            norm = _store_within(weight, target, self.max_norm * _INSIDE, within)
        return min(operator.norm(weight), operator.deviation_factor(weight) * norm)


KINDS: Mapping[str, type[Projection]] = {
    "clip": Clip, "clip_singular": ClipSingular, "fixed": Fixed, "bjorck": Bjorck, "frobenius": Frobenius,
}  # fmt: skip


# ---- storing a weight within a radius


def _scaled_to(weight: Tensor, norm: float, max_norm: float, operator: Operator) -> float:
    return _store_within(weight, as_float64(weight) / norm * max_norm, max_norm, operator.norm)


def _store_within(weight: Tensor, target: Tensor, max_norm: float, certified_norm: Callable[[Tensor], float]) -> float:
    """Stores ``target`` (float64, norm about max_norm) so that the certificate of the stored values is <= max_norm.

    Rounding to the weight's dtype moves the norm either way. In float32 four units in the last place are
    given away at once, which spares a second certificate; in bfloat16 they would be 3 %, so there the loss
    grows from zero.
    """
    eps = torch.finfo(weight.dtype).eps
    loss = 4.0 * eps if eps < 1e-6 else 0.0
    for attempt in range(_ATTEMPTS):
        weight.copy_(target * (1.0 - min(loss, 1.0)))
        norm = certified_norm(weight)
        if norm <= max_norm:
            return norm
        excess = norm / max_norm - 1.0
        loss = max(2.0 * loss, loss + (excess if attempt == 0 else 0.0) + eps / 16.0)
    raise ValueError(
        f"the certified norm is still {norm} > {max_norm} for a weight scaled down to zero: the operator does not "
        "read the weight that it is given.\nHINT: compute the norm from the weight, as dense_norm does."
    )


def _blocks(weight: Tensor, groups: int) -> Tensor:
    """Returns a float64 copy of the weight as one matrix per group, (groups, c_out / groups, everything else)."""
    if weight.ndim < 2 or groups < 1 or weight.shape[0] % groups:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is not a stack of {groups} matrices.\n"
            "HINT: give groups as the convolution has it; biases are not projected."
        )
    return as_float64(weight).clone().reshape(groups, weight.shape[0] // groups, -1)


def _matrix_norm(groups: int) -> Callable[[Tensor], float]:
    return lambda weight: float(spectral_norms(_blocks(weight, groups)).max())


# ---- the layers of a model


def _first_match(name: str, patterns: Sequence[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def resolve_projection(
    names: Sequence[str], kind: str, max_norm: float | Mapping[str, float | None] | None, free: Sequence[str] = ()
) -> dict[str, Projection | None]:
    """Returns the projection of every layer, None for those left free.

    A layer may be left free because its own norm does not enter its own bound.
    ``max_norm`` is one radius or a mapping from fnmatch patterns to radii, of which the first that matches
    counts; a radius of None frees the layers, and so does a match in ``free``, which comes first. ValueError,
    with all problems at once, for a pattern that matches nothing, a layer that nothing matches, an unknown
    kind, a bad radius.
    """
    radii: Mapping[str, float | None] = max_norm if isinstance(max_norm, Mapping) else {"*": max_norm}
    problems = [] if kind in KINDS else [f"projection={kind!r} is not one of {tuple(KINDS)}"]
    for pattern, radius in radii.items():
        if radius is not None and not (math.isfinite(radius) and radius > 0.0):
            problems.append(f"max_norm={radius} for {pattern!r} is not finite and positive")
    given = [*(radii if isinstance(max_norm, Mapping) else ()), *free]
    unmatched = [pattern for pattern in given if not any(fnmatchcase(name, pattern) for name in names)]
    problems += [f"the pattern {pattern!r} matches no layer" for pattern in unmatched]
    chosen: dict[str, float | None] = {}
    for name in names:
        match = _first_match(name, tuple(radii))
        freed = _first_match(name, free) is not None
        if match is None and not freed:
            problems.append(f"the layer {name!r} matches no pattern of max_norm")
        chosen[name] = None if freed or match is None else radii[match]
    if problems:
        raise ValueError(
            "the projection cannot be set up: " + "; ".join(problems) + f".\nHINT: the layers are {list(names)}; "
            "patterns are those of fnmatch, '*' matches all, and 'free' lists layers without a bound."
        )
    return {name: None if radius is None else KINDS[kind](radius) for name, radius in chosen.items()}


@torch.no_grad()
def standardize(weight: Tensor, variance: bool) -> None:
    """Gives every output channel's kernel mean 0 and, with ``variance``, the same norm, in place.

    The mean is taken away by the Euclidean projection onto a linear space, so that an average of such kernels has it
    too. With ``variance``, every channel's kernel is then scaled to the root mean square of their norms, as a
    standardised weight times one gain; the gain is bounded by the norm projection that follows. A channel of which
    nothing is left stays zero. Radial scaling and cutting of singular values keep the means at 0.
    """
    rows = weight.double().reshape(weight.shape[0], -1)
    rows = rows - rows.mean(1, keepdim=True)
    if variance:
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        common = norms.square().mean().sqrt()
        rows = torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(torch.float64).tiny) * common, 0.0)
    weight.copy_(rows.reshape(weight.shape))


def standardized_layers(weights: Mapping[str, Tensor], kind: str, free: frozenset[str]) -> dict[str, Tensor]:
    """Returns the convolutions that standardisation applies to; raises ValueError where it would leave nothing."""
    if kind == "none":
        return {}
    chosen = {name: w for name, w in weights.items() if w.dim() > 2 and name not in free}
    single = [name for name, w in chosen.items() if w[0].numel() == 1]
    if single or not chosen:
        reason = f"a kernel of one weight is its own mean: {', '.join(single)}" if single else "there is no convolution"
        raise ValueError(
            f"standardize={kind!r} cannot apply; {reason}.\nHINT: list such layers in free_layers, or leave it out."
        )
    return chosen
