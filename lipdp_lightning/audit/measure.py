"""Measures, for a batch of examples, every quantity that a certificate bounds, differentiably in the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ..bounds.certificate import Certificate, GroupBound
from ..bounds.losses import Loss
from ..bounds.shapes import propagate_shapes, trace_at
from .recorder import Runner, Tensors

_TINY = 1e-30

Live = tuple[Tensors, Tensors, Tensors]
"""Weights, probes of values and probes of single uses; gradients are taken with respect to all three."""


@dataclass(frozen=True)
class Measured:
    """Ratios of R examples to their bounds, of shape (R, groups), (R, nodes) or (R,)."""

    group: Tensor
    layerwise: Tensor
    joint: Tensor
    loss: Tensor
    forward: Tensor
    cotangent: Tensor

    def flat(self) -> Tensor:
        """Returns all ratios as (R, quantities), in the order of :func:`quantity_names`."""
        middle = torch.stack((self.joint, self.loss), 1)
        return torch.cat((self.group, self.layerwise, middle, self.forward, self.cotangent), 1)


def quantity_names(certificate: Certificate) -> list[str]:
    groups = [g.name for g in certificate.groups]
    nodes = [n.name for n in certificate.nodes]
    return [
        *(f"group {g}, worst_case" for g in groups),
        *(f"group {g}, layerwise" for g in groups),
        "joint",
        "loss gradient",
        *(f"node {n}, forward" for n in nodes),
        *(f"node {n}, cotangent" for n in nodes),
    ]


def row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1)


def slopes(goal: Tensor, leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """Returns gradients of a sum of ratios, zero where there is none; None where torch lacks a second derivative."""
    if not goal.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    try:
        found = torch.autograd.grad(goal, list(leaves), allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return None
    return [torch.nan_to_num(slope, posinf=0.0, neginf=0.0) for slope in found]


def ratio(measured: Tensor, certified: float) -> Tensor:
    """Returns measured / certified; over a bound of zero, rounding noise counts as 0 and anything more as infinite."""
    noise = measured <= 1e-12
    if certified == 0:
        return torch.where(noise, torch.zeros_like(measured), torch.full_like(measured, torch.inf))
    return measured / certified


class Meter:
    """Measures one model, in its own dtype, against certificates of its current weights."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, ...], loss: Loss, certificate: Certificate) -> None:
        self.model, self.loss = model, loss
        graph = trace_at(model, input_shape)
        propagate_shapes(graph, input_shape)
        self._runner = Runner(graph)
        inside = {id(p): name for name, p in self._runner.named_parameters()}
        self._inside = {n: inside[id(p)] for n, p in model.named_parameters() if id(p) in inside}
        tuples = {n.name for n in graph.graph.nodes if isinstance(n.meta["shape"], list)}
        self._shapes = {n.name: n.shape for n in certificate.nodes if n.name not in tuples}
        scalable = [(u, len(g.uses) > 1) for g in certificate.groups for u in g.uses if u.scalable]
        self._scalable = {use.node for use, _ in scalable}
        # the gradients of a layer that is used more than once are scaled use by use
        outside = {id(p): n for n, p in model.named_parameters()}
        self._separate: dict[str, tuple[str, Tensor]] = {}
        for use, shared in scalable:
            for name, p in graph.get_submodule(use.module).named_parameters() if shared else ():
                if p.requires_grad:
                    self._separate[f"{use.node}/{name}"] = outside[id(p)], torch.zeros_like(p)
        self._vectorised = True

    def trained(self) -> Tensors:
        """Returns the trained parameters under the model's names."""
        return {n: p for n, p in self.model.named_parameters() if n in self._inside and p.requires_grad}

    def ratios(
        self,
        inputs: Tensor,
        targets: Tensor,
        certificate: Certificate,
        parameters: Tensors | None = None,
        differentiable: bool = True,
    ) -> Measured:
        """Returns measured over certified for every example, differentiable in inputs, and in parameters if given."""
        weights = {n: p.detach() for n, p in self.trained().items()} if parameters is None else parameters
        probes = {n: inputs.new_zeros((1, *shape)) for n, shape in self._shapes.items()}
        live = (weights, probes, {k: zero for k, (_, zero) in self._separate.items()})
        with torch.set_grad_enabled(differentiable):
            found = self._vectorised_gradients(live, inputs, targets) if self._vectorised else None
            if found is None:
                self._vectorised = False
                rows = [self._one(live, x, y, differentiable) for x, y in zip(inputs, targets, strict=True)]
                found = _stacked([r[0] for r in rows]), _stacked([r[1] for r in rows])
            gradients, aux = found
            return self._compare(gradients, aux, certificate)

    def _vectorised_gradients(self, live: Live, inputs: Tensor, targets: Tensor) -> Any:
        """Returns None if the model does not vectorise: custom autograd functions have no vmap rule."""
        per_example = grad(self._single, argnums=(0, 1, 2), has_aux=True)
        try:
            return vmap(per_example, in_dims=(None, None, None, 0, 0), randomness="same")(*live, inputs, targets)
        except RuntimeError:
            return None

    def _single(
        self, weights: Tensors, probes: Tensors, use_probes: Tensors, x: Tensor, y: Tensor
    ) -> tuple[Tensor, tuple[Tensors, Tensors]]:
        renamed = {self._inside[n]: p for n, p in weights.items()}
        arguments = (x.unsqueeze(0), probes, use_probes, self._scalable)
        logits, values, norms = functional_call(self._runner, renamed, arguments)
        return self.loss.per_example(logits, y.unsqueeze(0)).sum(), (values, norms)

    def _one(self, live: Live, x: Tensor, y: Tensor, differentiable: bool) -> Any:
        with torch.enable_grad():
            weights, probes, use_probes = (
                {k: v if v.requires_grad else v.detach().clone().requires_grad_() for k, v in part.items()}
                for part in live
            )
            fresh = weights, probes, use_probes
            loss, aux = self._single(*fresh, x, y)
            leaves = [v for part in fresh for v in part.values()]
            found = torch.autograd.grad(
                loss, leaves, create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
        gradients = iter(found)
        return tuple({k: next(gradients) for k in part} for part in fresh), aux

    def _compare(self, gradients: Any, aux: Any, certificate: Certificate) -> Measured:
        by_parameter, cotangents, by_use = gradients
        values, norms = aux
        sizes = self._group_sizes(certificate.groups, by_parameter)
        rows = next(iter(values.values())).shape[0]
        plain = [ratio(s, g.worst_case) for s, g in zip(sizes, certificate.groups, strict=True)]
        scaled = [
            ratio(self._layerwise(g, s, by_parameter, by_use, norms), g.layerwise)
            for s, g in zip(sizes, certificate.groups, strict=True)
        ]
        forward = [ratio(row_norms(values[n.name]), n.forward) for n in certificate.nodes]
        zero = forward[0].new_zeros(rows)
        backward = [
            ratio(row_norms(cotangents[n.name]), n.cotangent) if n.name in cotangents else zero
            for n in certificate.nodes
        ]
        at_output = ratio(row_norms(cotangents[certificate.output]), certificate.loss_lipschitz)
        joint = joint_ratio(certificate.groups, sizes, norms, zero)
        return Measured(_columns(plain, zero), _columns(scaled, zero), joint, at_output, _columns(forward, zero),
                        _columns(backward, zero))  # fmt: skip

    def _group_sizes(self, groups: Sequence[GroupBound], by_parameter: Tensors) -> list[Tensor]:
        return [row_norms(torch.cat([by_parameter[n].flatten(1) for n in g.parameters], 1)) for g in groups]

    def _layerwise(
        self, group: GroupBound, size: Tensor, by_parameter: Tensors, by_use: Tensors, norms: Tensors
    ) -> Tensor:
        """Returns ||sum over uses of g_u / n_u||; uses that cannot be scaled stay as they are."""
        if len(group.uses) == 1:
            use = group.uses[0]
            return size / norms[use.node].flatten().clamp_min(_TINY) if use.scalable else size
        scaled = {name: by_parameter[name] for name in group.parameters}
        for key, piece in by_use.items():
            name = self._separate[key][0]
            if name in scaled:
                n = norms[key.partition("/")[0]].reshape(-1, *(1,) * (piece.dim() - 1))
                scaled[name] = scaled[name] - piece + piece / n.clamp_min(_TINY)
        return row_norms(torch.cat([s.flatten(1) for s in scaled.values()], 1))


def joint_ratio(groups: Sequence[GroupBound], sizes: Sequence[Tensor], norms: Tensors, zero: Tensor) -> Tensor:
    """Returns sqrt(sum_k (c_i ||g_ik|| / tau_k)^2) with c_i = 1 / sqrt(sum_k (l_k n_ik / tau_k)^2) and tau_k = Delta_k.

    A use whose layer cannot measure n_ik enters c_i with its worst case.
    """
    claimed, moved = zero, zero
    for group, size in zip(groups, sizes, strict=True):
        if group.worst_case == 0:
            continue
        own = zero
        for use in group.uses:
            n = norms[use.node].reshape(-1) if use.scalable else use.gradient_factor
            own = own + use.cotangent_bound * n
        claimed = claimed + (own / group.worst_case) ** 2
        moved = moved + (size / group.worst_case) ** 2
    return (moved / claimed.clamp_min(_TINY) + _TINY).sqrt()


def _columns(columns: Sequence[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(tuple(columns), 1) if columns else zero.reshape(-1, 1)[:, :0]


def _stacked(items: Sequence[Any]) -> Any:
    if isinstance(items[0], tuple):
        return tuple(_stacked([i[j] for i in items]) for j in range(len(items[0])))
    return {k: torch.stack([i[k] for i in items]) for k in items[0]}
