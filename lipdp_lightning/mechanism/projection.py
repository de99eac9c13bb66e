"""Projections of one layer's weight after a step, each with a certificate of what is stored.

All functions change the weight in place and return a certified upper bound on the norm of the layer's
operator. The radius is met by the values as stored in the weight's dtype: the weight is computed in float64,
rounded, certified again, and scaled down by a few units in the last place until the certificate of the stored
values is within it.

``certified_norm`` is a function of a weight tensor that returns an upper bound on the norm of the operator
with that weight, for instance :func:`lipdp_lightning.bounds.norms.conv_norm` with its geometry. It must read
the values of the tensor it is given. ``kappa`` and ``groups`` are those of the convolution, 1 for a dense
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lipdp_lightning.bounds.gram import as_float64, rounding_margin, spectral_norms

CertifiedNorm = Callable[[Tensor], float]

KINDS = ("clip", "clip_singular", "fixed", "bjorck", "frobenius")
BJORCK_STEPS = 12

_ATTEMPTS = 64
_INSIDE = 1.0 - 2.0**-40
"""Radius kept by the norms of this module, so that another evaluation order of the same bound is within it too."""


def _require_radius(max_norm: float) -> None:
    if not (math.isfinite(max_norm) and max_norm > 0.0):
        raise ValueError(
            f"max_norm={max_norm} is no radius: a projection needs a finite positive one.\n"
            "HINT: use a value near 1, or leave the layer free."
        )


def _store_within(weight: Tensor, target: Tensor, max_norm: float, certified_norm: CertifiedNorm) -> float:
    """Store ``target`` (float64, norm about max_norm) so that the certificate of the stored values is <=
    max_norm.

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
        f"certified_norm still returns {norm} > {max_norm} for a weight scaled down to zero: it does not "
        "read the tensor it is given.\nHINT: pass a function of the weight, such as dense_norm."
    )


def _blocks(weight: Tensor, groups: int) -> Tensor:
    """float64 copy of the weight as one matrix per group, (groups, c_out / groups, everything else)."""
    if weight.ndim < 2 or groups < 1 or weight.shape[0] % groups:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is no stack of {groups} matrices.\n"
            "HINT: give groups as the convolution has it; biases are not projected."
        )
    return as_float64(weight).clone().reshape(groups, weight.shape[0] // groups, -1)


def _reshaped_norm(groups: int) -> CertifiedNorm:
    return lambda weight: float(spectral_norms(_blocks(weight, groups)).max())


@torch.no_grad()
def clip(weight: Tensor, max_norm: float, certified_norm: CertifiedNorm) -> float:
    """Scale the weight down to norm <= max_norm, if it is above (ClipWeights of Barczewski & Ramon 2024).

    Radial: the direction is kept. This is not the Euclidean projection onto the spectral ball, and projected
    gradient descent with it may stop at a point that is no optimum; see :func:`clip_singular`.
    """
    _require_radius(max_norm)
    norm = certified_norm(weight)
    if norm <= max_norm:
        return norm
    return _store_within(weight, as_float64(weight) / norm * max_norm, max_norm, certified_norm)


@torch.no_grad()
def fixed(weight: Tensor, max_norm: float, certified_norm: CertifiedNorm) -> float:
    """Scale the weight, up or down, to norm = max_norm (Fix-Lip-DP-SGD of Barczewski & Ramon 2024).

    The CERTIFIED norm becomes max_norm up to a few units in the last place of the dtype, from below; the norm
    itself is lower by the slack of ``certified_norm``. A zero weight has no direction: it is left at zero,
    and 0.0 returned.
    """
    _require_radius(max_norm)
    norm = certified_norm(weight)
    if norm == 0.0:
        return 0.0
    return _store_within(weight, as_float64(weight) / norm * max_norm, max_norm, certified_norm)


@torch.no_grad()
def clip_singular(
    weight: Tensor, max_norm: float, certified_norm: CertifiedNorm, *, kappa: float = 1.0, groups: int = 1
) -> float:
    """Euclidean projection onto {s(reshaped weight) <= max_norm / kappa}: larger singular values are cut to
    that.

    For a dense layer this is the projection onto the spectral ball. For a convolution the reshaped kernel is
    c_out x (c_in k_h k_w), per group, and s(conv) <= kappa s(reshaped kernel) <= max_norm; the set is convex
    but smaller than {s(conv) <= max_norm}, so that a kernel may be changed though its own norm is within
    max_norm.
    """
    _require_radius(max_norm)
    radius = max_norm / kappa * _INSIDE
    within = _reshaped_norm(groups)
    norm = within(weight)
    if norm > radius:
        left, values, right = torch.linalg.svd(_blocks(weight, groups), full_matrices=False)
        target = (left * values.clamp_max(radius)[..., None, :]) @ right
        norm = _store_within(weight, target.reshape(weight.shape), radius, within)
    return min(certified_norm(weight), max_norm)


@torch.no_grad()
def bjorck(
    weight: Tensor,
    max_norm: float,
    certified_norm: CertifiedNorm,
    *,
    kappa: float = 1.0,
    groups: int = 1,
    steps: int = BJORCK_STEPS,
) -> float:
    """Drive the singular values of the reshaped weight towards max_norm by Bjorck-Bowie iteration.

    The matrix is first divided by a certified norm, so that its singular values lie in [0, 1]; each step maps
    s to s (3 - s^2) / 2, which keeps [0, 1] (and maps [0, 2] into [-1, 1]), so one certificate serves any
    number of steps. Afterwards s(reshaped weight) <= max_norm: the norm is <= max_norm for a dense layer but
    only <= kappa max_norm for a convolution, and that is what the returned value certifies. A zero weight
    stays zero.
    """
    _require_radius(max_norm)
    blocks = _blocks(weight, groups)
    norms = spectral_norms(blocks)[:, None, None]
    blocks = blocks / torch.where(norms > 0, norms, torch.ones_like(norms))
    wide = blocks.shape[-2] < blocks.shape[-1]
    for _ in range(steps):
        cubic = (blocks @ blocks.mT) @ blocks if wide else blocks @ (blocks.mT @ blocks)
        blocks = 1.5 * blocks - 0.5 * cubic
    target = max_norm * blocks.reshape(weight.shape)
    norm = _store_within(weight, target, max_norm * _INSIDE, _reshaped_norm(groups))
    return min(certified_norm(weight), kappa * norm)


@torch.no_grad()
def frobenius(weight: Tensor, max_norm: float, certified_norm: CertifiedNorm, *, kappa: float = 1.0) -> float:
    """Euclidean projection onto {||W||_F <= max_norm}, the kernel of a convolution taken as it is.

    s(W) <= ||W||_F bounds a dense layer by max_norm and a convolution by kappa max_norm only.
    """
    _require_radius(max_norm)

    margin = rounding_margin(weight.shape[0], weight[0].numel())  # that of a spectral norm is within it then

    def within(stored: Tensor) -> float:
        return float(torch.linalg.vector_norm(as_float64(stored).flatten())) * margin

    norm = within(weight)
    if norm > max_norm:
        target = as_float64(weight) / norm * max_norm
        norm = _store_within(weight, target, max_norm * _INSIDE, within)
    return min(certified_norm(weight), kappa * norm)


@dataclass(frozen=True)
class ProjectionRule:
    """How one layer is projected: one of KINDS, and the radius."""

    kind: str
    max_norm: float

    def __post_init__(self) -> None:
        _require_kind(self.kind)
        _require_radius(self.max_norm)

    def apply(self, weight: Tensor, certified_norm: CertifiedNorm, *, kappa: float = 1.0, groups: int = 1) -> float:
        """Project in place; return a certified norm of what is stored."""
        if self.kind == "clip":
            return clip(weight, self.max_norm, certified_norm)
        if self.kind == "fixed":
            return fixed(weight, self.max_norm, certified_norm)
        if self.kind == "clip_singular":
            return clip_singular(weight, self.max_norm, certified_norm, kappa=kappa, groups=groups)
        if self.kind == "bjorck":
            return bjorck(weight, self.max_norm, certified_norm, kappa=kappa, groups=groups)
        return frobenius(weight, self.max_norm, certified_norm, kappa=kappa)


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"projection={kind!r} is not one of {KINDS}.\nHINT: 'clip' is that of the papers.")


def _first_match(name: str, patterns: Sequence[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def resolve_projection(
    names: Sequence[str],
    kind: str,
    max_norm: float | Mapping[str, float | None],
    free: Sequence[str] = (),
) -> dict[str, ProjectionRule | None]:
    """The rule of every layer, None for those left free (a layer's own norm does not enter its own bound).

    ``max_norm`` is one radius or a mapping from fnmatch patterns to radii, of which the first that matches
    counts; a radius of None frees the layer, and so does a match in ``free``, which comes first. ValueError,
    with all problems at once, for a pattern that matches nothing, a layer that nothing matches, an unknown
    kind, a bad radius.
    """
    radii: Mapping[str, float | None] = max_norm if isinstance(max_norm, Mapping) else {"*": max_norm}
    problems = [] if kind in KINDS else [f"projection={kind!r} is not one of {KINDS}"]
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
    return {name: None if radius is None else ProjectionRule(kind, radius) for name, radius in chosen.items()}
