"""The Strategy, which connects Lightning's optimizer step with the mechanism, for any number of processes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ..accounting.spending import Spending
from ..bounds.certifier import Certifier
from ..clipping import Clipper, make_clipper
from ..kernels.arithmetic import check_exact_arithmetic
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.noise import Place
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.branches import Branches
from ..privacy.keys import derive_key, new_secret
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from .averaging import WeightAverage, average_of
from .batches import padding_multiple, planned_draws, transfer_problems
from .checkpoint_files import OwnerOnlyCheckpointIO
from .checkpoints import CheckpointStrategy, Restored, hyperparameters, settle_statistics
from .context import can_repeat, context_of
from .current_step import CurrentStep
from .model_checks import DATA_METHODS
from .module import PrivateModule
from .set_up import check_set_up, make_certifier, matching_modules, refuse, require_exact_products, steps_per_epoch
from .step_record import StepRecord, key_of_record, name_on_record
from .views import Views, views_of
from .withheld import withhold


class PrivateStrategy(CheckpointStrategy):
    """Trains a PrivateModule under a PrivacyPlan, on one process or many.

    Sampler, mechanism and accountant hold the one ``plan``. Noise is added directly after the backward pass that
    completes a step, before any hook, clipping or monitor. User code hence finds private values in ``parameter.grad``,
    and None between the micro-batches of a step. Weights are projected directly after the optimizer's step. Values that
    user code computes itself from a batch, a loss or an output are not private.

    Args:
        plan: The frozen plan of this run.
        physical_batch_size: The rows of the largest expected micro-batch per process; it affects memory and speed only.
        noise_mode: 'distributed' (each rank adds its share before the one all-reduce), 'replicated', or 'sharded' (each
            rank draws the noise, and holds the optimizer's state, of its share of the parameters).
        checksum_every_n_steps: The number of steps after which ranks compare weights and bounds; None never does.
        deterministic: Whether GPUs must repeat their bits, so that a resume after a crash repeats its steps.
        tf32: Whether weight gradients in float32 may be formed on a GPU's tensor cores; the noise pays for it.
        fixed_secret: 16 bytes, for tests alone; the report says that it was fixed.
        branches: The ledger of branches, on disk for a run with a directory.
        record: The record of steps, on disk for a run with a directory.
        statistics: The statistics released before the first step, on disk for a run with a directory.

    Example::

        Trainer(strategy=PrivateStrategy(plan), max_steps=plan.steps, max_epochs=-1, use_distributed_sampler=False)
    """

    strategy_name = "private"

    def __init__(
        self,
        plan: PrivacyPlan | None = None,
        *,
        physical_batch_size: int | None = None,
        noise_mode: str = "distributed",
        checksum_every_n_steps: int | None = 100,
        deterministic: bool = False,
        tf32: bool = False,
        fixed_secret: bytes | None = None,
        branches: Branches | None = None,
        record: StepRecord | None = None,
        statistics: Statistics | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("checkpoint_io", OwnerOnlyCheckpointIO())
        super().__init__(**kwargs)
        self.checksum_every_n_steps = checksum_every_n_steps
        self.fixed_secret = fixed_secret
        self.branches, self.record, self.statistics = Branches(), StepRecord(None), Statistics()
        self.configure(plan, physical_batch_size, noise_mode, branches, record, statistics, deterministic, tf32)
        self.mechanism: Mechanism | None = None
        self.clipper: Clipper | None = None
        self.views: Views | None = None
        self.average: WeightAverage | None = None
        self._secret = b""
        self.restored = Restored()
        self._hooks: list[Any] = []
        self._branch, self._record_key = "", b""
        self._can_repeat = True
        self._norms = Follower()
        self._current: CurrentStep | None = None
        self.configured: list[dict[str, Any]] = []
        self._checked: Any = None
        self._reads_rows = False
        self.where_rows_are = ""

    # ---- set-up

    def configure(
        self,
        plan: PrivacyPlan | None,
        physical_batch_size: int | None,
        noise_mode: str,
        branches: Branches | None = None,
        record: StepRecord | None = None,
        statistics: Statistics | None = None,
        deterministic: bool = False,
        tf32: bool = False,
        public_context: bytes = b"",
    ) -> None:
        """Replaces the constructor's arguments by those of a configuration.

        Args:
            plan, physical_batch_size, noise_mode, deterministic, tf32: As in the constructor.
            branches, record, statistics: As in the constructor; None keeps the present one.
            public_context: Names the configuration; a run that is continued under another one starts a new branch.
        """
        self.plan, self.physical_batch_size, self.noise_mode = plan, physical_batch_size, noise_mode
        self.branches = branches or self.branches
        self.record = record or self.record
        self.statistics = statistics or self.statistics
        self.deterministic, self.tf32, self.public_context = deterministic, tf32, public_context
        self._spending: Spending | None = None

    @property
    def chunks(self) -> int:
        """The number of micro-batches per step and process."""
        if self.physical_batch_size is None:
            return 1
        assert self.plan is not None
        rows = int(self.plan.expected_batch_size) * self.rows_per_example
        return max(1, -(-rows // (self.world_size * self.physical_batch_size)))

    @property
    def rows_per_example(self) -> int:
        """The number of rows that the network receives for each example."""
        return 1 if self.views is None else self.views.number

    @property
    def spending(self) -> Spending:
        """The plan's epsilon over the steps, which is computed once for all that show it."""
        assert self.plan is not None
        if self._spending is None:
            self._spending = Spending(self.plan)
        return self._spending

    def check(self, trainer: lightning.Trainer, module: Any, data: Any) -> None:
        """Raises one ValueError with every reason to refuse this set-up; it writes nothing."""
        self.views, self.average = views_of(trainer), average_of(trainer)
        check_set_up(trainer, module, self, data)
        self._checked = module

    def setup_environment(self) -> None:
        """Refuses whatever cannot be trained privately, before a logger or a callback has opened a file."""
        module, problem = self.lightning_module, None
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING and self._checked is not module:
            try:
                self.check(module.trainer, module, getattr(module.trainer, "datamodule", None))
            except Exception as error:
                if self.world_size == 1:
                    raise
                problem = error
        super().setup_environment()
        self.ranks.raise_together(problem)  # otherwise the other ranks would wait for this one

    def setup(self, trainer: lightning.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self.setup_evaluation(trainer)
            self._reads_rows = True
            return
        module, plan, data = self.lightning_module, self.plan, trainer.datamodule  # type: ignore[attr-defined]
        assert plan is not None and isinstance(module, PrivateModule)
        trainer.accumulate_grad_batches = self.chunks
        module.clip_loss(plan.loss_clip)
        require_exact_products(self.root_device, self.deterministic)
        super().setup(trainer)
        self.configured = [hyperparameters(o) for o in self.optimizers]
        norms = self._norms = Follower()
        certifier = make_certifier(trainer, module, plan, data, norms)
        self.clipper = make_clipper(module.network, plan)
        self._hooks = attach_cotangent_clips(module.network, matching_modules(module.network, plan.cotangent_clip))
        self.statistics = settle_statistics(self, data)
        if plan.preliminary:  # the hooks on a batch depend on the statistics
            refuse(transfer_problems(data, DATA_METHODS))
        self._can_repeat = can_repeat(self)
        self._open_branch(context_of(self, trainer, module, data))
        self.mechanism = self._make_mechanism(module, certifier, norms)
        # other branches of the run may leave fewer steps than the trainer was asked for
        trainer.fit_loop.epoch_loop.max_steps = min(trainer.max_steps, self.branches.limit())
        expected = plan.expected_batch_size * self.rows_per_example / (self.world_size * self.chunks)
        module.rows_to_multiple_of = padding_multiple(module.network, expected, self.rows_per_example)
        self._current = CurrentStep(module, self, data)
        if hasattr(data, "place"):
            self.where_rows_are = data.place(self.root_device)
        data.bind(self._draw(data.rows), steps_per_epoch(plan), self.chunks, lambda: trainer.global_step)
        self._reads_rows = True

    def _make_mechanism(self, module: PrivateModule, certifier: Certifier, norms: Follower) -> Mechanism:
        """Returns the mechanism of a run, in the state that its checkpoint has."""
        assert self.plan is not None
        mechanism = Mechanism(
            module.network, certifier, self.plan, self._secret,
            place=Place(self.global_rank, self.world_size, self.noise_mode),  # type: ignore[arg-type]
            context=self.branches.context, views=self.rows_per_example,
        )  # fmt: skip
        if self.restored.run is None:
            mechanism.project_()
        else:
            mechanism.load_state(self.restored.run.mechanism)
            norms.load_state(self.restored.norms)
        return mechanism

    def _open_branch(self, context: bytes) -> None:
        """Continues a branch or starts a new one, as rank 0 decides; all ranks use its secret."""
        assert self.plan is not None
        plan, steps = self.plan.digest().hex(), self.plan.steps

        def opened() -> Branches:
            secret, fixed = self.fixed_secret or new_secret(), self.fixed_secret is not None
            run = self.restored.run
            if run is not None:
                known = self.restored.record if self.branches.is_here(run) else None
                name, key = name_on_record(run.secret), key_of_record(run.secret)
                self.record.require(name, self.branches.taken_here(run), key, known)
            self.branches.open(run, context, plan, steps, secret, fixed)
            return self.branches

        self.branches = self.ranks.from_first(opened)
        self._secret = self.branches.secret
        self._branch, self._record_key = name_on_record(self._secret), key_of_record(self._secret)

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        return planned_draws(self._secret, self.plan, rows, self.global_rank, self.world_size, self.chunks)

    def step_key(self, purpose: str, *indices: int) -> int:
        """Returns the key of a purpose at the present step, which is the same on every rank."""
        key = derive_key(self._secret, purpose, self._number, *indices)
        return int.from_bytes(key[:8], "big", signed=True)

    def dropout_key(self, layer: int) -> int:
        """Returns the key of a layer's masks at the present step."""
        return self.step_key("dropout", layer)

    # ---- the step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device; if it is for training, hooks receive a copy."""
        arrived = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return arrived
        return self.current.hand_over(self.numbered(arrived))

    def numbered(self, batch: Any) -> Any:
        """Returns a batch with the ids by which views and dropout are drawn; here the sampler's own ids."""
        return batch

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Begins the step with its first micro-batch, and passes the data module's batch to the module."""
        current = self.current
        drawn = current.opened(batch)
        check_exact_arithmetic()
        if current.between_steps:
            self._begin_step()
            current.begin(self._number)
        else:  # nothing may have changed since
            assert self.mechanism is not None
            self.mechanism.begin_step(self._number)
        return super().training_step(drawn, *args, **kwargs)

    @property
    def current(self) -> CurrentStep:
        """The step that is under way, once the run is set up."""
        assert self._current is not None, "the Strategy is not set up for training"
        return self._current

    @property
    def _number(self) -> int:
        """The number of the present step."""
        module = self.lightning_module
        assert module is not None
        return module.trainer.global_step

    def _begin_step(self) -> None:
        mechanism, step = self.mechanism, self._number
        assert mechanism is not None
        assert step < self.branches.limit(), f"step {step} is beyond the plan"
        if self.is_global_zero:
            self.branches.reserve(step)
        mechanism.begin_step(step, None if self._can_repeat else self.ranks.agree, sealed=self._can_repeat)
        every = self.checksum_every_n_steps
        if every is not None and self.world_size > 1 and step % every == 0:
            self.ranks.check_in_step(step, mechanism.checksum)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass, and adds noise before the first hook that sees gradients."""
        module, current, chunks = self.lightning_module, self.current, self.chunks
        assert module is not None
        before = closure_loss._version, closure_loss.grad_fn
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        _check_same_loss(loss, closure_loss, before)
        current.check_gradients()
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if current.add(chunks):
            self._release()
            current.mark_released()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _release(self) -> None:
        """Puts the step on record, and replaces the sum by its release."""
        mechanism, step = self.mechanism, self._number
        assert mechanism is not None
        check_exact_arithmetic()
        if not self._can_repeat:
            self._put_on_record(step, mechanism.digest)
        reduce = self._all_reduce if self.world_size > 1 else None
        mechanism.privatize_(step, reduce, self._seal if self._can_repeat else None)

    def _seal(self, own: bytes) -> bytes:
        """Puts one digest of what all processes are about to release on record, and returns it."""
        digest = self.ranks.agree(own)
        self._put_on_record(self._number, digest)
        return digest

    def _put_on_record(self, step: int, digest: bytes) -> None:
        """Records what the step is about to be released from; if the record has another release, all ranks raise."""
        assert self.mechanism is not None
        deviations = self.mechanism.deviations().values()
        scales = struct.pack(f"{len(deviations)}d", *deviations)
        entry = derive_key(self._secret, "step", step, digest, scales)[:16].hex()
        self.ranks.first_does(lambda: self.record.take(self._branch, step, entry, self._record_key))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps on released gradients alone, projects the weights, and averages them."""
        assert self.mechanism is not None
        number, current = self._number, self.current

        def complete(*a: Any, **k: Any) -> Any:
            result = closure(*a, **k)
            assert current.is_released(number), "the optimizer would step on gradients without noise"
            return result

        output = super().optimizer_step(optimizer, complete, model, **kwargs)
        if self.mechanism.owners:
            self._gather(self.mechanism.owners)
        self.mechanism.project_()
        if self.average is not None:
            self.average.update(self.mechanism.model, number + 1)
        return output

    def on_exception(self, exception: BaseException) -> None:
        """Withholds the message of an error after rows have been read, since it may depend on them."""
        if self._reads_rows:
            withhold(exception)
        super().on_exception(exception)

    # ---- checkpoints

    @property
    def between_steps(self) -> bool:
        """Returns whether a checkpoint taken now holds whole steps."""
        return self._current is None or self._current.between_steps

    def teardown(self) -> None:
        if self.mechanism is not None:
            self.mechanism.close()
        self.record.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.restored, self._checked = [], Restored(), None
        self._reads_rows = False
        super().teardown()


def _check_same_loss(loss: Tensor, given: Tensor, before: tuple[int, Any]) -> None:
    """Refuses a loss that hooks before the backward pass have changed, since this would change every gradient."""
    if loss is not given or (loss._version, loss.grad_fn) != before or loss._backward_hooks:
        raise ValueError(
            "a hook has changed the loss, or will change its gradient, and the certificate is for the loss as it was. "
            "HINT: on_before_backward may look at the loss and no more; put the factor into a Loss."
        )
