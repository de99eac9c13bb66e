"""Measures ratios on the training path: the layers' own backward, with and without their gradient scalers."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate
from ..bounds.certifier import certify
from ..bounds.losses import Loss
from ..layers.scaled import ScaledLayer
from .measure import ratio

_FLOOR = 1e-12


@dataclass(frozen=True)
class TrainingRatios:
    """The largest ratio over the candidates for each group, and for the joint scaling."""

    worst_case: dict[str, float]
    layerwise: dict[str, float]
    joint: float


def training_ratios(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_bound: float,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
) -> TrainingRatios:
    """Runs each candidate as a batch of one, in ``dtype``, against the certificate of the weights as cast to it."""
    net = copy.deepcopy(model).to(dtype)
    certificate = certify(net, input_shape, input_bound, loss, compute_dtype=dtype)
    names = [g.name for g in certificate.groups]
    plain, scaled, joint = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0.0
    for x, y in zip(inputs.to(dtype), targets, strict=True):
        y = y.to(dtype) if y.is_floating_point() else y
        norms: dict[int, list[Tensor]] = {}
        sizes = _gradient_sizes(net, loss, x, y, certificate, _watch(norms))
        for name, size in sizes.items():
            plain[name] = max(plain[name], _over(size, certificate.group(name).worst_case))
        joint = max(joint, _joint(net, certificate, sizes, norms))
        sizes = _gradient_sizes(net, loss, x, y, certificate, lambda _: lambda n: 1 / n.clamp_min(_FLOOR))
        for name, size in sizes.items():
            scaled[name] = max(scaled[name], _over(size, certificate.group(name).layerwise))
    return TrainingRatios(plain, scaled, joint)


def _over(size: float, bound: float) -> float:
    return float(ratio(torch.tensor([size], dtype=torch.float64), bound))


def _watch(norms: dict[int, list[Tensor]]):  # type: ignore[no-untyped-def]
    def scaler_of(layer: nn.Module):  # type: ignore[no-untyped-def]
        def look(n: Tensor) -> None:
            norms.setdefault(id(layer), []).append(n.detach().double())

        return look

    return scaler_of


def _gradient_sizes(net, loss, x, y, certificate, scaler_of) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Returns the norm of each group's gradient for one example, with a scaler on every scaled layer."""
    layers = [m for m in net.modules() if isinstance(m, ScaledLayer)]
    for layer in layers:
        layer.gradient_scaler = scaler_of(layer)
    try:
        net.zero_grad(set_to_none=True)
        loss.per_example(net(x.unsqueeze(0)), y.unsqueeze(0)).sum().backward()
    finally:
        for layer in layers:
            layer.gradient_scaler = None
    found = {n: p.grad for n, p in net.named_parameters()}
    sizes = {}
    for group in certificate.groups:
        parts = [found[n].double().flatten() for n in group.parameters if found[n] is not None]
        sizes[group.name] = float(torch.linalg.vector_norm(torch.cat(parts))) if parts else 0.0
    return sizes


def _joint(net: nn.Module, certificate: Certificate, sizes: dict[str, float], norms: dict[int, list[Tensor]]) -> float:
    """Returns :func:`lipdp_lightning.audit.measure.joint_ratio` from the n_ik that the layers reported, call
    by call.
    """
    calls = {key: iter(list(values)) for key, values in norms.items()}
    claimed = moved = 0.0
    order = {node.name: i for i, node in enumerate(certificate.nodes)}
    for group in certificate.groups:
        if group.worst_case == 0:
            continue
        own = 0.0
        for use in sorted(group.uses, key=lambda u: order[u.node]):
            if use.scalable:
                own += use.cotangent_bound * float(next(calls[id(_module(net, use.module))]))
            else:
                own += use.cotangent_bound * use.gradient_factor
        claimed += (own / group.worst_case) ** 2
        moved += (sizes[group.name] / group.worst_case) ** 2
    return (moved / claimed) ** 0.5 if claimed > 0 else 0.0


def _module(net: nn.Module, path: str) -> nn.Module:
    """Returns a layer by its path; a model that is one layer is certified inside a Sequential, as its member '0'."""
    return net if isinstance(net, ScaledLayer) else net.get_submodule(path)
