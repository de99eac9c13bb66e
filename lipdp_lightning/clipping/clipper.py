"""Clips per example by opacus, as DP-SGD does: sums of clipped gradients in place of sums of gradients.

Noise, sampling, division by the expected batch size and accounting are the engine's own, with the clip radii as
sensitivities (clipping/clipped_groups.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from torch import Tensor, nn

from ..privacy.plan import PrivacyPlan
from ..privacy.plan_parts import ClippedExamples
from . import samplers  # noqa: F401 - registers the samplers of this library's layers
from .clipped_groups import clip_groups, group_radius
from .factors import clip_factors

LossOf = Callable[[Tensor], Tensor]


class OpacusClipper:
    """Makes a loss whose gradient is sum_i c_ik g_ik over the rows of a micro-batch, with ||c_ik g_ik|| <= R_k for
    each.

    With flat and per_layer, the clipped gradients of the examples are formed and added; each is bounded by its own norm
    as computed, whatever the layers do. Rows that are views of one example share the factor that clips their mean,
    which is what enters the release. With ghost, norms come first, then a second pass over the weighted losses, and
    every view is clipped by itself. A row whose gradient is not finite counts as zero. Hooks exist during the pass
    alone.
    """

    def __init__(self, network: nn.Module, plan: PrivacyPlan, views: int = 1) -> None:
        self._network, self._plan, self._views = network, plan, views
        self._parameters = [p for p in network.parameters() if p.requires_grad]

    def total(self, rows: Tensor, loss_of: LossOf, step: int) -> Tensor:
        """Returns the summed loss of the rows; ``loss_of`` gives the loss of each."""
        if not rows.shape[0]:
            return loss_of(rows).sum()
        self._check_mode()
        influence = self._plan.influence_at(step)
        assert isinstance(influence, ClippedExamples)
        sums_of = self._reweighted if influence.name == "clip_ghost" else self._summed
        loss, sums = sums_of(rows, loss_of, influence.clipping)
        given: Tensor = _Given.apply(loss.detach(), sums, *self._parameters)
        return given

    def _check_mode(self) -> None:
        """Raises ValueError if a trained layer is in evaluation mode, since opacus would miss its gradient."""
        layers = self._network.named_modules()
        skipped = [name for name, m in layers if not m.training and any(p.requires_grad for p in m.parameters(False))]
        if skipped:
            raise ValueError(
                f"{', '.join(skipped)} is trained in eval mode, where opacus takes no gradient per example. "
                "HINT: call train() on it, or freeze it with requires_grad_(False)."
            )

    def _summed(self, rows: Tensor, loss_of: LossOf, clipping: str) -> tuple[Tensor, list[Tensor]]:
        """Sums clipped gradients from per-example gradients."""
        with _watched(self._network, GradSampleHooks, self._parameters):
            loss = loss_of(rows).sum()
            loss.backward()
            samples = {id(p): _one(p) for p in self._parameters}
        sums: dict[int, Tensor] = {}
        radius = group_radius(self._network, self._plan)
        with torch.no_grad():
            for _, members in clip_groups(self._network, self._plan.scaling):
                gradients = {id(p): samples[id(p)] for p in members.values()}
                norms = _norms(list(gradients.values()), self._views)
                factors = clip_factors(norms, radius, clipping).repeat_interleave(self._views)
                sums |= {key: _weighted_sum(factors, gradient) for key, gradient in gradients.items()}
        return loss, [sums[id(p)] for p in self._parameters]

    def _reweighted(self, rows: Tensor, loss_of: LossOf, clipping: str) -> tuple[Tensor, list[Tensor]]:
        """Sums clipped gradients by ghost norms."""
        loss, norms, sums = self._ghost(rows, loss_of, clipping)
        finite = torch.isfinite(norms)
        if not finite.all():
            # zero times infinity has spoiled the sum, so such a row takes part as an example of zeros, with factor zero
            clean = torch.where(finite.reshape(-1, *(1,) * (rows.dim() - 1)), rows, torch.zeros_like(rows))
            _, _, sums = self._ghost(clean, loss_of, clipping, finite)
        return loss, sums

    def _ghost(
        self, rows: Tensor, loss_of: LossOf, clipping: str, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns the loss, upper bounds of the examples' gradient norms, and the clipped sums of the ``kept`` rows."""
        with _watched(self._network, GradSampleHooksFastGradientClipping, self._parameters) as hooks:
            losses = loss_of(rows)
            losses.sum().backward(retain_graph=True)
            found: list[Any] = [p._norm_sample for p in self._parameters]  # type: ignore[attr-defined]
            norms = torch.stack(found).double().square().sum(0).sqrt()
            factors = clip_factors(norms, group_radius(self._network, self._plan), clipping)
            if kept is not None:
                factors = torch.where(kept, factors, 0.0)
            hooks.disable_hooks()
            sums = torch.autograd.grad((losses * factors.to(losses.dtype)).sum(), self._parameters)
        return losses.sum(), norms, list(sums)


@contextmanager
def _watched(network: nn.Module, kind: type[Any], parameters: list[nn.Parameter]) -> Iterator[Any]:
    """Puts opacus's hooks on the network; afterwards no hook, sample or raw gradient remains."""
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    hooks = kind(network, loss_reduction="sum", strict=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no inputs require gradients.*")  # the data need none
            yield hooks
    finally:
        hooks.cleanup()
        for module in network.modules():
            module.__dict__.pop("activations", None)
            module.__dict__.pop("max_batch_len", None)
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.grad = kept
            parameter.__dict__.pop("_norm_sample", None)


def _one(parameter: Any) -> Tensor:
    sample = parameter.grad_sample
    assert isinstance(sample, Tensor), "every use of a trained parameter must go through its layer"
    return sample


def _norms(gradients: list[Tensor], views: int) -> Tensor:
    """Returns the norm of each example over all its gradients, in float64: that of the mean over its views."""
    means = [g.flatten(1) if views == 1 else torch.unflatten(g.flatten(1), 0, (-1, views)).mean(1) for g in gradients]
    each = [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in means]
    return torch.stack(each).square().sum(0).sqrt()


def _weighted_sum(factors: Tensor, gradients: Tensor) -> Tensor:
    """Returns sum_i c_i g_i; a row of factor zero is left out, even if it is not finite."""
    shape = (-1, *(1,) * (gradients.dim() - 1))
    kept = torch.where((factors != 0).reshape(shape), gradients, torch.zeros((), dtype=gradients.dtype))
    return torch.tensordot(factors.to(gradients.dtype), kept, dims=1)


class _Given(torch.autograd.Function):
    """A value whose gradients in the parameters are given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(cotangent * gradient for gradient in ctx.gradients))
