"""Settles the scaling `auto` from the certificate of a network, without data."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate, UseBound
from ..bounds.certifier import CertificationError, Certifier
from ..bounds.rounding import LARGEST_BOUND
from ..layers import ScaledLayer
from ..layers.scaled import hands_over
from ..norms.operators import NormSource, Operator
from ..privacy.plan import PrivacyPlan
from .module import PrivateModule
from .set_up import matching_modules

LARGEST_NORMS = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0)
# the share of the bound on an example's gradient at the outputs to which it is clipped where one layer is trained: an
# example that is nearly certain of a wrong class has all of it, and the noise is in proportion to the clip
CLIPPED_TO = 0.5
ROOM_FOR_BIASES = 1e3  # no projection limits them, and they enter the bounds of values
_ROUNDING = 1e-3  # margins of the certificate, which no reason is made of


def settle(plan: PrivacyPlan, module: PrivateModule, data: Any, norm_is_open: bool = False) -> tuple[PrivacyPlan, str]:
    """Returns the plan with a scaling in place of `auto`, and the reason, which is empty for a scaling that is named.

    What decides is the structure of the network and no weight, so that all processes and every resume of a run decide
    alike.

    Args:
        plan: The plan.
        module: The module that is to be trained.
        data: The data module, of which only the declared shape of an example is used.
        norm_is_open: Whether a plan whose scaling is named is to have the largest norm of layers that `auto` chooses.

    Raises:
        ValueError: If the network has no certificate.
    """
    if plan.is_settled:
        if norm_is_open:
            plan = _plan_of(plan.to_dict() | {"max_norm": largest_norm(plan, module, data)})
        return plan, ""
    certificate = _certifier(plan, module, data, _SameNorm(1.0)).certify()
    if len(certificate.groups) == 1:  # an operator behind the one layer now shows in the bound of its cotangents
        certificate = _certifier(plan, module, data, _SameNorm(2.0)).certify()
    scaling, reason = choose_scaling(module.network, certificate)
    if scaling == "exact":
        return with_scaling(plan, "exact", largest_norm(plan, module, data)), reason
    if len(certificate.groups) > 1:
        return with_scaling(plan, "joint", 1.0), reason
    clip = plan.loss_clip
    if clip is None:
        clip = float(f"{CLIPPED_TO * certificate.loss_lipschitz:.3g}")
        reason += f"; each example's gradient at the outputs is clipped to {clip:g}, half of its bound (loss_clip)"
    # the norm of a layer enters the bounds of others, and not its own
    return with_scaling(plan, "joint", None, clip), reason


def with_scaling(
    plan: PrivacyPlan, scaling: Literal["joint", "exact"], max_norm: float | None, loss_clip: float | None = None
) -> PrivacyPlan:
    """Returns the plan with a scaling in place of `auto`; noise, steps and epsilon are those of the plan.

    Args:
        plan: The plan. What else it leaves open becomes flat clipping to norm 1 for `exact`, and an optimal allocation
            for `joint`, which drops a radius.
        scaling: The scaling.
        max_norm: The largest norm of a layer, if the plan leaves it open.
        loss_clip: The norm to which each example's gradient at the outputs is clipped, if the plan names none.
    """
    assert not plan.is_settled, f"the scaling is {plan.scaling} already"
    options, exact = plan.to_dict(), scaling == "exact"
    options |= {"scaling": scaling, "radius": (options["radius"] or 1.0) if exact else None}
    options |= {"loss_clip": loss_clip if options["loss_clip"] is None else options["loss_clip"]}
    defaults = {"allocation": "global" if exact else "optimal", "max_norm": max_norm}
    options |= {name: value for name, value in defaults.items() if options[name] == "auto"}
    return _plan_of(options)


def _plan_of(options: dict[str, Any]) -> PrivacyPlan:
    with warnings.catch_warnings():  # the plan has caused them already
        warnings.simplefilter("ignore")
        return PrivacyPlan.from_dict(options)


def _certifier(plan: PrivacyPlan, module: PrivateModule, data: Any, norms: NormSource) -> Certifier:
    with torch.compiler.set_stance("force_eager"):  # tracing needs the network's own code, not compiled code
        return Certifier(
            module.network, data.input_shape, module.input_bound, module.private_loss(plan.loss_clip),
            norms=norms, cotangent_caps=matching_modules(module.network, plan.cotangent_clip),
        )  # fmt: skip


class _SameNorm(NormSource):
    """Gives every operator one norm, so that a certificate is that of the worst weights within it."""

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        return self.norm


def largest_norm(plan: PrivacyPlan, module: PrivateModule, data: Any) -> float:
    """Returns the largest norm of all layers for which the certificate stays finite however they are trained.

    Exact norms of examples do not need small layers, but a certificate that overflows would end the run.
    """
    for norm in LARGEST_NORMS:
        with contextlib.suppress(CertificationError):
            certificate = _certifier(plan, module, data, _SameNorm(norm)).certify()
            bounds = [max(node.forward, node.cotangent) for node in certificate.nodes]
            bounds += [group.worst_case for group in certificate.groups]
            if max(bounds) < LARGEST_BOUND / ROOM_FOR_BIASES:
                return norm
    return 1.0


def choose_scaling(network: nn.Module, certificate: Certificate) -> tuple[Literal["joint", "exact"], str]:
    """Returns `joint` where bounds lose nothing or exact norms cannot be had, and `exact` elsewhere, with the reason.

    One dense layer on vectors has the gradient d x^T for each example, whose norm is its bound ||d|| ||x||. The
    gradient of a layer with P positions is a sum of P such products, which is typically sqrt(P) times shorter than the
    bound. The bound on the cotangent d behind further layers holds for the example that they stretch most, and typical
    examples are far below it.
    """
    uses = [use for group in certificate.groups for use in group.uses]
    unmeasured = [use.module or use.node for use in uses if not use.scalable]
    own = [path for path, layer in network.named_modules() if isinstance(layer, ScaledLayer) and not hands_over(layer)]
    if unmeasured or own:
        return "joint", f"the gradients of single examples in {_listing(unmeasured + own)} cannot be measured"
    reasons = []
    widest = max(uses, key=lambda use: _positions(network, certificate, use))
    if (positions := _positions(network, certificate, widest)) > 1:
        loose = f"about {math.sqrt(positions):.2g} times too large"
        reasons.append(f"{widest.module} sums over {positions} positions, which makes its bound {loose}")
    reasons += [
        f"{group.name} has {len(group.uses)} uses (tied weights), whose norms add"
        for group in certificate.groups
        if len(group.uses) > 1
    ]
    if len(certificate.groups) > 1:
        reasons.append(f"{len(certificate.groups)} layers are trained, and bounds loosen with depth")
    elif not reasons and uses[0].cotangent_bound > certificate.loss_lipschitz * (1 + _ROUNDING):
        reasons.append(f"what follows {uses[0].module} loosens its bound")
    return ("exact", "; ".join(reasons)) if reasons else ("joint", "one dense layer on vectors, whose bound is tight")


def _positions(network: nn.Module, certificate: Certificate, use: UseBound) -> int:
    """Returns the number of products that one example's gradient is a sum of."""
    shape = certificate.node(use.node).shape
    return math.prod(shape[:-1] if isinstance(network.get_submodule(use.module), nn.Linear) else shape[1:])


def _listing(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
