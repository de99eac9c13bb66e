"""The Strategy, which connects Lightning's optimizer step with the mechanism, for any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ..accounting.accountants import Spending
from ..clipping import Clipper
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.branches import Branches
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from .averaging import WeightAverage, average_of
from .checkpoint_files import OwnerOnlyCheckpointIO
from .checkpoints import CheckpointStrategy, Restored, hyperparameters
from .current_step import CurrentStep
from .module import PrivateModule
from .private_steps import PrivateSteps
from .set_up import check_set_up, require_exact_products
from .step_record import StepRecord
from .views import Views, views_of
from .withheld import withhold


class PrivateStrategy(CheckpointStrategy, PrivateSteps):
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
        scaling_reason: str = "",
    ) -> None:
        """Replaces the constructor's arguments by those of a configuration.

        Args:
            plan, physical_batch_size, noise_mode, deterministic, tf32: As in the constructor.
            branches, record, statistics: As in the constructor; None keeps the present one.
            public_context: Names the configuration; a run that is continued under another one starts a new branch.
            scaling_reason: Why the scaling was chosen, if the configuration left it open.
        """
        self.plan, self.physical_batch_size, self.noise_mode = plan, physical_batch_size, noise_mode
        self.branches = branches or self.branches
        self.record = record or self.record
        self.statistics = statistics or self.statistics
        self.deterministic, self.tf32, self.public_context = deterministic, tf32, public_context
        self.scaling_reason = scaling_reason
        self._spending: Spending | None = None

    @property
    def rows_per_example(self) -> int:
        """The number of rows that the network receives for each example."""
        return 1 if self.views is None else self.views.number

    def check(self, trainer: lightning.Trainer, module: Any, data: Any) -> None:
        """Raises one ValueError with every reason to refuse this set-up; it writes nothing."""
        self.views, self.average = views_of(trainer), average_of(trainer)
        self._settle(module, data)
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
        self._prepare_steps(trainer, module, data)
        # other branches of the run may leave fewer steps than the trainer was asked for
        trainer.fit_loop.epoch_loop.max_steps = min(trainer.max_steps, self.branches.limit())
        self._reads_rows = True

    # ---- the step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to the device; if it is for training, hooks receive a copy."""
        arrived = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        if module is None or not module.trainer.training:
            return arrived
        assert self._current is not None, "the Strategy is not set up for training"
        return self._current.hand_over(self.numbered(arrived))

    def numbered(self, batch: Any) -> Any:
        """Returns a batch with the ids by which views and dropout are drawn; here the sampler's own ids."""
        return batch

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Begins the step with its first micro-batch, and passes the data module's batch to the module."""
        return super().training_step(self._begin_pass(batch, self._number), *args, **kwargs)

    @property
    def _number(self) -> int:
        """The number of the present step."""
        module = self.lightning_module
        assert module is not None
        return module.trainer.global_step

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass, and adds noise before the first hook that sees gradients."""
        module = self.lightning_module
        assert module is not None and self._current is not None
        leaf = closure_loss.detach().requires_grad_()
        shown = leaf.clone()  # through the loss itself, a hook could reach what the backward pass reads
        before = shown._version, shown.grad_fn
        self.pre_backward(shown)
        _check_same_loss(self.precision_plugin.pre_backward(shown, module), shown, before, leaf)
        self._current.check_gradients()
        with self._backward_pass():
            closure_loss.backward(*args, **kwargs)
        self._end_pass()
        loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps on released gradients alone, projects the weights, and averages them."""
        number, current = self._number, self._current
        assert self.mechanism is not None and current is not None

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


def _check_same_loss(loss: Tensor, given: Tensor, before: tuple[int, Any], leaf: Tensor) -> None:
    """Refuses hooks before the backward pass that changed the loss, or ran a backward pass of their own."""
    if loss is not given or (loss._version, loss.grad_fn) != before or loss._backward_hooks or leaf.grad is not None:
        raise ValueError(
            "a hook has changed the loss, or will change its gradient, and the certificate is for the loss as it was. "
            "HINT: on_before_backward may look at the loss and no more; put the factor into a Loss."
        )
