"""What a run's noise belongs to: everything that decides its steps, in one digest."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import lightning
import torch

from .. import __version__
from ..kernels.numeric_environment import numeric_environment, repeats_bits
from .sources import code_digest


def can_repeat(strategy: Any) -> bool:
    """Whether a step that is taken again from the same state may have the same bits.

    Where it cannot, every start of a run takes a new secret, and no step is ever released twice under one.
    """
    return repeats_bits(strategy.root_device)


def context_of(strategy: Any, trainer: lightning.Trainer, module: Any, data: Any) -> bytes:
    """Digest of all that decides a step's sum and its successors besides the weights.

    A run that is continued under another digest takes a new secret. Ranks that differ in it are refused.
    """
    schedules = [(type(c.scheduler).__name__, c.scheduler.state_dict()) for c in strategy.lr_scheduler_configs]
    clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    settings = f"{strategy.world_size} {strategy.chunks} {strategy.noise_mode} {strategy.precision_plugin.precision}"
    shared = {
        "the version of this package": __version__.encode(),
        "the privacy plan": strategy.plan.digest() if strategy.plan is not None else b"",
        "the network": repr(module.network).encode(),
        "the loss or the input's bound": repr((module.loss, module.bounded_input)).encode(),
        "the training data": data.fingerprint(),
        "the released statistics": strategy.statistics.digest(),
        "the Strategy's settings": settings.encode(),
        "the augmentations": b"" if strategy.views is None else strategy.views.identity(),
        "the optimizer": repr((strategy.configured, schedules, clipping)).encode(),
        "the code": code_digest(_computed_by(strategy, module, data)),
    }
    restored = None if strategy.restored is None else (strategy.restored.step, strategy.restored.secret)
    compared = {
        **shared,
        "checksum_every_n_steps": repr(strategy.checksum_every_n_steps).encode(),
        "the checkpoint to continue from": repr(restored).encode(),
    }
    strategy.ranks.check_equal({name: hashlib.sha256(value).digest() for name, value in compared.items()})
    parts = [*shared.values(), numeric_environment(strategy.root_device), str(torch.get_num_threads()).encode()]
    if strategy.is_global_zero:
        parts += [strategy.public_context, str(strategy.record.divergences).encode()]
        if strategy.record.divergences:
            parts.append(os.urandom(16))  # a replay was not bit-identical: none is tried again
    if not can_repeat(strategy):
        parts.append(os.urandom(16))  # a replay would not be bit-identical: every resume is a new branch
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return strategy.ranks.agree(digest.digest())


def _computed_by(strategy: Any, module: Any, data: Any) -> list[Any]:
    """Everything that an example passes on its way into a sum."""
    augmentations = [] if strategy.views is None else [m for a in strategy.views.augmentations for m in a.modules()]
    return [*module.modules(), data, *augmentations]
