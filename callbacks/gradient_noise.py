"""Estimates signal and noise in a step from released quantities alone."""

from __future__ import annotations

import math
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.report.formats import clean_text


class GradientNoiseMonitor(Callback):
    """Logs the norm of the noise and an estimate of the signal's norm for each parameter group.

    The released sum s_k has E||s_k||^2 = ||signal||^2 + d_k sigma_k^2, and only s_k and the public sigma_k are used:
    the estimate sqrt(max(0, ||s_k||^2 - d_k sigma_k^2)) is post-processing and costs nothing. For signals below the
    noise it is unreliable: in a single step, its square has a standard deviation of about sigma_k^2 sqrt(2 d_k).
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not positive. HINT: use 10.")
        self.every_n_steps = every_n_steps
        self.history: list[dict[str, Any]] = []

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: Optimizer
    ) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        mechanism = _strategy(trainer).mechanism
        assert mechanism is not None
        deviations = mechanism.deviations()
        named = dict(mechanism.model.named_parameters())
        gradients = [[named[n].grad for n in group.parameters] for group in mechanism.certificate.groups]
        squares = [torch.stack([g.double().square().sum() for g in own if g is not None]).sum() for own in gradients]
        sizes = torch.stack(squares).sqrt().tolist()
        divisor = mechanism.plan.expected_batch_size
        row: dict[str, Any] = {"step": trainer.global_step}
        signal, noise = 0.0, 0.0
        for group, size in zip(mechanism.certificate.groups, sizes, strict=True):
            expected_noise = math.sqrt(group.numel) * deviations[group.name] / divisor
            estimate = math.sqrt(max(0.0, size**2 - expected_noise**2))
            row[f"signal/{group.name}"], row[f"noise/{group.name}"] = estimate, expected_noise
            signal, noise = signal + estimate**2, noise + expected_noise**2
        row["gradient_to_noise"] = math.sqrt(signal / noise) if noise > 0 else 0.0
        self.history.append(row)
        logged = {clean_text(f"gradient/{k}"): v for k, v in row.items() if k != "step"}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)
