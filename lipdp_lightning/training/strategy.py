"""The Strategy: glue between Lightning's one optimizer funnel and the mechanism, for any number of processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import __version__
from ..bounds.certifier import Certifier
from ..bounds.tracked import TrackedNorms
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.mechanism import Mechanism, Place
from ..privacy.branches import Branches, ResumeState
from ..privacy.plan import PrivacyPlan
from ..privacy.randomness import derive_key, new_secret, numeric_environment
from ..privacy.sampling import local_slice, poisson_sample
from .guards import check_set_up, matching_modules, steps_per_epoch


class PrivateStrategy(DDPStrategy):
    """Trains a PrivateModule under a PrivacyPlan, on one process or many.

    Sampler, mechanism and accountant hold the one ``plan``. Noise enters inside the optimizer's closure,
    after backward and before every hook, clipping and monitor, so user code sees private gradients only;
    weights are projected directly after the optimizer's step.

    Args:
        plan: the frozen plan of this run.
        physical_batch_size: largest expected micro-batch per process; a pure performance knob.
        noise_mode: 'distributed' (each rank adds its share before the one all-reduce) or 'replicated'.
        fixed_secret: 16 bytes, for tests alone; the report says that it was fixed.
    """

    strategy_name = "private"

    def __init__(
        self,
        plan: PrivacyPlan | None = None,
        *,
        physical_batch_size: int | None = None,
        noise_mode: str = "distributed",
        fixed_secret: bytes | None = None,
        branches: Branches | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        self.physical_batch_size = physical_batch_size
        self.noise_mode = noise_mode
        self.fixed_secret = fixed_secret
        self.branches = branches or Branches()
        self.mechanism: Mechanism | None = None
        self.public_context = b""
        self._secret = b""
        self._restored: ResumeState | None = None
        self._hooks: list[Any] = []

    # ---- set-up

    @property
    def chunks(self) -> int:
        """Micro-batches per step and process."""
        if self.physical_batch_size is None:
            return 1
        assert self.plan is not None
        return max(1, -(-int(self.plan.expected_batch_size) // (self.world_size * self.physical_batch_size)))

    def setup(self, trainer: lightning.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        module = self.lightning_module
        trainer.accumulate_grad_batches = self.chunks
        check_set_up(trainer, module, self)
        assert self.plan is not None and module is not None
        module.clip_loss(self.plan.loss_clip)
        super().setup(trainer)
        data = trainer.datamodule
        clips = matching_modules(module.network, self.plan.cotangent_clip)
        certifier = Certifier(
            module.network, data.input_shape, module.input_bound, module.loss,
            norms=TrackedNorms(), compute_dtype=_compute_dtype(trainer), cotangent_caps=clips,
        )  # fmt: skip
        self._hooks = attach_cotangent_clips(module.network, clips)
        self._open_branch(self._context(module, data))
        place = Place(self.global_rank, self.world_size, self.noise_mode)
        self.mechanism = Mechanism(
            module.network, certifier, self.plan, self._secret, place=place, context=self.branches.context
        )
        if self._restored is None:
            self.mechanism.project_()
        else:
            self.mechanism.load_state(self._restored.mechanism)
        data.bind(self._draw(data.rows), steps_per_epoch(self.plan), self.chunks, lambda: trainer.global_step)

    def _open_branch(self, context: bytes) -> None:
        """Rank 0 decides whether the secret goes on or a new branch starts; all ranks use its secret."""
        assert self.plan is not None
        if self.is_global_zero:
            secret, fixed = self.fixed_secret or new_secret(), self.fixed_secret is not None
            plan = self.plan.digest().hex()
            self.branches.open(self._restored, context, plan, self.plan.steps, secret, fixed)
        self.branches = self.broadcast(self.branches)
        self._secret = self.branches.secret

    def configure_ddp(self) -> None:
        """No reducer: gradients meet once, after noise. Rank 0's initial weights go to all."""
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            self._from_first(tensor.data)

    def _from_first(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            torch.distributed.broadcast(tensor, src=0)

    def _context(self, module: nn.Module, data: Any) -> bytes:
        """Digest of all that a step's sum depends on besides the weights and the plan."""
        parts = [
            __version__.encode(), repr(module.network).encode(), repr(module.loss).encode(),
            repr(module.bounded_input).encode(), data.fingerprint(), self.public_context,
            f"{self.world_size} {self.chunks} {self.noise_mode} {self.precision_plugin.precision}".encode(),
            numeric_environment(),
        ]  # fmt: skip
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return self.broadcast(digest.digest())

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        plan = self.plan

        def draw(step: int, chunk: int) -> Tensor:
            sample = poisson_sample(self._secret, step, rows, plan.sample_rate)
            return local_slice(sample, self.global_rank, self.world_size, chunk, self.chunks)

        return draw

    def dropout_key(self, layer: int) -> int:
        """Key of one dropout layer at the present step, the same on every rank."""
        key = derive_key(self._secret, "dropout", self.lightning_module.trainer.global_step, layer)
        return int.from_bytes(key[:8], "big", signed=True)

    # ---- the step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.mechanism is not None and self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        if self.is_global_zero:
            self.branches.reserve(step)
        self.mechanism.begin_step(step)
        return super().training_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        mechanism = self.mechanism
        assert mechanism is not None and self.lightning_module is not None
        step = self.lightning_module.trainer.global_step

        def private_closure() -> Any:
            result = closure()
            mechanism.privatize_(step, self._all_reduce if self.world_size > 1 else None)
            return result

        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        mechanism.project_()
        return output

    def _all_reduce(self, total: Tensor) -> None:
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)

    # ---- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Resume checkpoints carry the secret; weights-only ones never do."""
        if self.mechanism is not None and "optimizer_states" in checkpoint:
            step = self.lightning_module.trainer.global_step
            checkpoint["lipdp"] = self.branches.state(step, self.mechanism.state()).to_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        saved = checkpoint.get("lipdp")
        self._restored = None if saved is None else ResumeState.from_dict(saved)
        return checkpoint

    def teardown(self) -> None:
        if self.mechanism is not None:
            self.mechanism.close()
        for hook in self._hooks:
            hook.remove()
        super().teardown()


def _compute_dtype(trainer: lightning.Trainer) -> torch.dtype:
    precision = str(trainer.precision)
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float64 if precision.startswith("64") else torch.float32
