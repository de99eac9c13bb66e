"""One step of DP-SGD without a Trainer: the clipper, the radii as sensitivities, the mechanism without its noise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from private_step import SECRET, Batch, Noiseless, make_plan, random_batch
from torch import Tensor, nn

from lipdp_lightning.clipping.clipped_groups import ClippedGroups
from lipdp_lightning.clipping.clipper import OpacusClipper
from lipdp_lightning.norms.follow import Follower
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule

SCALINGS = ("clip_flat", "clip_per_layer", "clip_ghost")
CLIPPINGS = ("local", "global", "automatic")


def clip_plan(
    scaling: str = "clip_flat", clipping: str = "local", clip_norm: float = 0.5, **options: Any
) -> PrivacyPlan:
    return make_plan(scaling=scaling, clipping=clipping, clip_norm=clip_norm, max_norm=None, **options)


class ClippedSteps:
    """``release`` gives the sums of a step, by group, as the mechanism would add its noise to them."""

    def __init__(
        self,
        network: nn.Module,
        input_shape: tuple[int, ...],
        plan: PrivacyPlan,
        *,
        chunks: int = 1,
        clipper: type[OpacusClipper] = OpacusClipper,
        loss: Any = "cross_entropy",
    ) -> None:
        self.module, self.plan, self.chunks = PrivateModule(network, loss), plan, chunks
        network = self.module.network
        certifier = ClippedGroups(plan, network, input_shape, 1.0, self.module.loss, norms=Follower())
        self.mechanism = Noiseless(network, certifier, plan, SECRET)
        self.clipper = clipper(network, plan)
        self.module.trainer = SimpleNamespace(
            strategy=SimpleNamespace(mechanism=self.mechanism, clipper=self.clipper, dropout_key=lambda k: k),
            accumulate_grad_batches=chunks, global_step=0,
        )  # fmt: skip

    def release(self, batch: Batch, step: int = 0) -> dict[str, Tensor]:
        self.module.trainer.global_step = step
        self.module.zero_grad(set_to_none=True)
        for chunk in range(self.chunks):
            self.mechanism.begin_step(step)
            loss = self.module.training_step(tuple(t[chunk :: self.chunks] for t in batch), chunk)
            (loss / self.chunks).backward()
        self.mechanism.privatize_(step)
        named = dict(self.module.network.named_parameters())
        return {
            g.name: torch.cat([named[n].grad.double().flatten() for n in g.parameters])
            for g in self.mechanism.certificate.groups
        }

    def shift(self, first: dict[str, Tensor], neighbour: Batch, step: int = 0) -> float:
        """How far a release is from that of the neighbour, in sensitivities of the groups: the largest of them."""
        second = self.release(neighbour, step)
        bounds = self.mechanism.sensitivities()
        return max(float((first[name] - second[name]).norm()) / bounds[name] for name in first)


def example_gradients(module: PrivateModule, batch: Batch) -> list[dict[str, Tensor]]:
    """Each example's gradient by autograd, one example at a time: the reference."""
    found = []
    named = {n: p for n, p in module.network.named_parameters() if p.requires_grad}
    for row in range(len(batch[0])):
        loss = module.loss.per_example(module(batch[0][row : row + 1]), batch[1][row : row + 1]).sum()
        found.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
    return found


def reference_factor(norm: float, radius: float, clipping: str) -> float:
    if clipping == "local":
        return 1.0 if norm <= radius else radius / norm
    if clipping == "global":
        return 1.0 if norm <= radius else 0.0
    return radius / (norm + 0.01)


def loud_batch(shape: tuple[int, ...], classes: int, size: int = 6) -> Batch:
    return random_batch(size, shape, classes, seed=2)
