"""The Strategy: glue between Lightning's one optimizer funnel and the mechanism, for any number of processes."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from .. import __version__
from ..bounds.tracked import TrackedNorms
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.mechanism import Mechanism, Place
from ..privacy.branches import Branches, ResumeState
from ..privacy.plan import PrivacyPlan
from ..privacy.randomness import derive_key, new_secret, numeric_environment
from ..privacy.sampling import local_slice, poisson_sample
from .checkpoint_io import OwnerOnlyCheckpointIO
from .guards import check_set_up, make_certifier, matching_modules, steps_per_epoch
from .module_guards import LiveChecks
from .ranks import Ranks
from .resume import apply_changes, check_fits, configured
from .settling import Settling
from .step_record import StepRecord


class PrivateStrategy(DDPStrategy):
    """Trains a PrivateModule under a PrivacyPlan, on one process or many.

    Sampler, mechanism and accountant hold the one ``plan``. Noise enters directly after the backward pass that
    completes a step, before any hook, clipping or monitor: what user code finds in ``parameter.grad``
    is private, and between the micro-batches of a step it finds None. Weights are projected directly after
    the optimizer's step. What user code computes itself from a batch, a loss or an output is
    not private, and nothing here can make it so.

    Args:
        plan: the frozen plan of this run.
        physical_batch_size: largest expected micro-batch per process; a pure performance knob.
        noise_mode: 'distributed' (each rank adds its share before the one all-reduce) or 'replicated'.
        checksum_every_n_steps: how often ranks compare their weights and bounds; None never does.
        fixed_secret: 16 bytes, for tests alone; the report says that it was fixed.
        branches: the record of what interruptions cost, on disk for a run with a directory.
        record: what each step was released from, on disk for a run with a directory.
    """

    strategy_name = "private"

    def __init__(
        self,
        plan: PrivacyPlan | None = None,
        *,
        physical_batch_size: int | None = None,
        noise_mode: str = "distributed",
        checksum_every_n_steps: int | None = 100,
        fixed_secret: bytes | None = None,
        branches: Branches | None = None,
        record: StepRecord | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("checkpoint_io", OwnerOnlyCheckpointIO())
        super().__init__(**kwargs)
        self.plan = plan
        self.physical_batch_size = physical_batch_size
        self.noise_mode = noise_mode
        self.checksum_every_n_steps = checksum_every_n_steps
        self.fixed_secret = fixed_secret
        self.branches = branches or Branches()
        self.record = record or StepRecord(None)
        self.mechanism: Mechanism | None = None
        self.public_context = b""
        self._secret = b""
        self._restored: ResumeState | None = None
        self._hooks: list[Any] = []
        self._branch = ""
        self._settling: Settling | None = None
        self._micro_batches = 0
        self._partial_sums: list[Tensor | None] = []
        self._private_step = -1
        self._live: LiveChecks | None = None
        self._configured: list[dict[str, Any]] = []
        self._checked: Any = None

    # ---- set-up

    @property
    def chunks(self) -> int:
        """Micro-batches per step and process."""
        if self.physical_batch_size is None:
            return 1
        assert self.plan is not None
        return max(1, -(-int(self.plan.expected_batch_size) // (self.world_size * self.physical_batch_size)))

    def check(self, trainer: lightning.Trainer, module: Any, data: Any) -> None:
        """Raise one ValueError with every reason to refuse this set-up. Writes nothing."""
        check_set_up(trainer, module, self, data)
        self._checked = module

    def setup_environment(self) -> None:
        """Every refusal comes here at the latest, before a logger or a callback has opened a file."""
        module, problem = self.lightning_module, None
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING and self._checked is not module:
            try:
                self.check(module.trainer, module, getattr(module.trainer, "datamodule", None))
            except Exception as error:
                if self.world_size == 1:
                    raise
                problem = error
        super().setup_environment()
        self.ranks.raise_together(problem)  # or the others would wait for this one

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.global_rank, self.world_size, self.root_device)

    def setup_distributed(self) -> None:
        """A process that is alone needs no process group, nor the port and the threads that come with one."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup(self, trainer: lightning.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._setup_evaluation(trainer)
            return
        module, plan, data = self.lightning_module, self.plan, trainer.datamodule  # type: ignore[attr-defined]
        assert plan is not None and module is not None
        trainer.accumulate_grad_batches = self.chunks
        module.clip_loss(plan.loss_clip)
        super().setup(trainer)
        self._configured = [configured(o) for o in self.optimizers]
        norms = TrackedNorms()
        certifier = make_certifier(trainer, module, plan, data, norms)
        self._hooks = attach_cotangent_clips(module.network, matching_modules(module.network, plan.cotangent_clip))
        self._open_branch(self._context(trainer, module, data))
        place = Place(self.global_rank, self.world_size, self.noise_mode)  # type: ignore[arg-type]
        self.mechanism = Mechanism(
            module.network, certifier, plan, self._secret, place=place, context=self.branches.context
        )
        if self._restored is None:
            self.mechanism.project_()
        else:
            self.mechanism.load_state(self._restored.mechanism)
        # other branches of the run may leave fewer steps than the trainer was asked for
        trainer.fit_loop.epoch_loop.max_steps = min(trainer.max_steps, self.branches.limit())
        self._micro_batches, self._partial_sums, self._private_step = 0, [], -1
        self._live = LiveChecks(module)
        self._branch = derive_key(self._secret, "branch on record")[:8].hex()
        replay = self.ranks.from_first(lambda: self.record.replay(self._branch))
        self._settling = Settling(norms, self.record, self._branch, replay, writes=self.is_global_zero)
        data.bind(self._draw(data.rows), steps_per_epoch(plan), self.chunks, lambda: trainer.global_step)

    def _setup_evaluation(self, trainer: lightning.Trainer) -> None:
        if self.world_size > 1:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def _open_branch(self, context: bytes) -> None:
        """Rank 0 decides whether the secret goes on or a new branch starts; all ranks use its secret."""
        assert self.plan is not None
        plan, steps = self.plan.digest().hex(), self.plan.steps

        def opened() -> Branches:
            secret, fixed = self.fixed_secret or new_secret(), self.fixed_secret is not None
            self.branches.open(self._restored, context, plan, steps, secret, fixed)
            return self.branches

        self.branches = self.ranks.from_first(opened)
        self._secret = self.branches.secret

    def configure_ddp(self) -> None:
        """No reducer: gradients meet once, after noise. Rank 0's initial weights go to all."""
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            self._from_first(tensor.data)

    def _from_first(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            dense = tensor.contiguous()  # channels_last is not, and a collective wants it
            torch.distributed.broadcast(dense, src=0)
            tensor.copy_(dense)

    def _context(self, trainer: lightning.Trainer, module: Any, data: Any) -> bytes:
        """Digest of all that decides a step's sum and its successors besides the weights and the plan."""
        schedules = [(type(c.scheduler).__name__, c.scheduler.state_dict()) for c in self.lr_scheduler_configs]
        clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        settings = f"{self.world_size} {self.chunks} {self.noise_mode} {self.precision_plugin.precision}"
        shared = {
            "the version of this package": __version__.encode(),
            "the privacy plan": self.plan.digest() if self.plan is not None else b"",
            "the network": repr(module.network).encode(),
            "the loss or the input's bound": repr((module.loss, module.bounded_input)).encode(),
            "the training data": data.fingerprint(),
            "the Strategy's settings": settings.encode(),
            "the optimizer": repr((self._configured, schedules, clipping)).encode(),
        }
        restored = None if self._restored is None else (self._restored.step, self._restored.secret)
        compared = {
            **shared,
            "checksum_every_n_steps": repr(self.checksum_every_n_steps).encode(),
            "the checkpoint to continue from": repr(restored).encode(),
        }
        self.ranks.check_equal({name: hashlib.sha256(value).digest() for name, value in compared.items()})
        parts = [*shared.values(), numeric_environment(), str(torch.get_num_threads()).encode()]
        if self.is_global_zero:
            parts += [self.public_context, str(self.record.divergences).encode()]
        if self.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            parts.append(os.urandom(16))  # a replay would not be bit-identical: every resume is a new branch
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return self.ranks.agree(digest.digest())

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        plan, drawn = self.plan, {-1: torch.empty(0, dtype=torch.int64)}

        def draw(step: int, chunk: int) -> Tensor:
            if step not in drawn:
                drawn.clear()
                drawn[step] = poisson_sample(self._secret, step, rows, plan.sample_rate)
            return local_slice(drawn[step], self.global_rank, self.world_size, chunk, self.chunks)

        return draw

    def dropout_key(self, layer: int) -> int:
        """Key of one dropout layer at the present step, the same on every rank."""
        key = derive_key(self._secret, "dropout", self.lightning_module.trainer.global_step, layer)
        return int.from_bytes(key[:8], "big", signed=True)

    # ---- the step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._micro_batches == 0:
            self._begin_step()
        return super().training_step(*args, **kwargs)

    def _begin_step(self) -> None:
        mechanism, step = self.mechanism, self.lightning_module.trainer.global_step
        assert mechanism is not None and self._live is not None and self._settling is not None
        assert step < self.branches.limit(), f"step {step} is beyond the plan"
        self._live.check()
        if self.is_global_zero:
            self.branches.reserve(step)
        self._settling.at_step(step)
        mechanism.begin_step(step, self.ranks.agree)
        every = self.checksum_every_n_steps
        if every is not None and self.world_size > 1 and step % every == 0:
            self.ranks.check_in_step(step, mechanism.checksum)
        if self.is_global_zero:
            scales = struct.pack(f"{len(mechanism.deviations())}d", *mechanism.deviations().values())
            self.record.take(self._branch, step, derive_key(self._secret, "step", step, mechanism.digest, scales)[:16].hex())

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's order, with noise between the backward pass and the first hook that sees gradients."""
        module, mechanism = self.lightning_module, self.mechanism
        assert module is not None and mechanism is not None
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._put_back()
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._micro_batches += 1
        if self._micro_batches == self.chunks:
            step = module.trainer.global_step
            mechanism.privatize_(step, self._all_reduce if self.world_size > 1 else None)
            self._private_step, self._micro_batches = step, 0
        else:
            self._hide()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _hide(self) -> None:
        """Between micro-batches the partial sum of gradients, which has no noise yet, is out of sight."""
        parameters = list(self.lightning_module.parameters())
        self._partial_sums = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _put_back(self) -> None:
        for parameter, partial in zip(self.lightning_module.parameters(), self._partial_sums, strict=False):
            parameter.grad = partial
        self._partial_sums = []

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        assert self.mechanism is not None
        step = self.lightning_module.trainer.global_step

        def complete(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            assert self._private_step == step, "the optimizer would step on gradients without noise"
            return result

        output = super().optimizer_step(optimizer, complete, model, **kwargs)
        self.mechanism.project_()
        return output

    def _all_reduce(self, total: Tensor) -> None:
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)

    # ---- checkpoints

    @property
    def between_steps(self) -> bool:
        """Whether a checkpoint taken now holds whole steps."""
        return self._micro_batches == 0

    @property
    def replaying(self) -> bool:
        """Whether the coming step repeats one of an earlier session; a checkpoint taken now would not be exact."""
        return self._settling is not None and self._settling.replaying(self.lightning_module.trainer.global_step)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Checkpoints to resume from carry the secret; weights-only ones never do."""
        if self.mechanism is not None and "optimizer_states" in checkpoint:
            step = self.lightning_module.trainer.global_step
            assert self._settling is not None
            self._settling.at_checkpoint(step)  # on every rank: their bounds stay the same
            if self.is_global_zero:  # the only one that writes, and that needs to see the run directory
                checkpoint["lipdp"] = self.branches.state(step, self.mechanism.state()).to_dict()
            checkpoint["lipdp_optimizers"] = self._configured
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        saved = checkpoint.get("lipdp")
        self._restored = None if saved is None else ResumeState.from_dict(saved)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        check_fits(checkpoint, self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The state, and of the hyper-parameters those that the configuration does not change."""
        super().load_optimizer_state_dict(checkpoint)
        before = checkpoint.get("lipdp_optimizers", self._configured)
        for optimizer, was, now in zip(self.optimizers, before, self._configured, strict=True):
            apply_changes(optimizer, was, now, scheduled=bool(self.lr_scheduler_configs))

    def teardown(self) -> None:
        if self.mechanism is not None:
            self.mechanism.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._restored, self._checked = [], None, None
        super().teardown()

