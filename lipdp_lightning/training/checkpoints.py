"""Checkpoints: the state of a run besides Lightning's own, checks that it fits, and its restoration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.branches import Branches, ResumeState
from ..privacy.keys import new_secret
from ..privacy.statistics import Statistics
from .averaging import WeightAverage
from .loop_progress import continue_after
from .processes import ProcessStrategy
from .step_record import RecordState, StepRecord

STATISTICS = "lipdp_statistics"  # the key in checkpoints


def settle_statistics(strategy: Any, data: Any) -> Statistics:
    """Releases the plan's statistics on rank 0, or finds those that the run has released; all ranks use its values.

    It must be called before the first branch is on record, since a run with branches has released its statistics.
    """
    plan, statistics = strategy.plan, strategy.statistics
    if not plan.preliminary:
        return Statistics()

    def settled() -> Statistics:
        restored = strategy.restored
        started = restored.run is not None or strategy.branches.count > 0
        statistics.settle(
            plan, data.statistic_terms, restored.statistics, started, strategy.fixed_secret or new_secret()
        )
        return statistics

    found: Statistics = strategy.ranks.from_first(settled)
    data.use_statistics(found.values)
    return found


def restore_statistics(checkpoint: Mapping[str, Any], data: Any) -> None:
    """Gives a data module the statistics with which its inputs were prepared in training."""
    if checkpoint.get(STATISTICS) and hasattr(data, "use_statistics"):
        data.use_statistics(checkpoint[STATISTICS])


_SCHEDULED = ("lr", "initial_lr")


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's class and the hyper-parameters of each of its groups, before any state is restored."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_fits(checkpoint: Mapping[str, Any], module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Refuses a checkpoint of another model or another optimizer before anything is loaded from it."""
    problems = []
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    different = [n for n in [*own, *(n for n in saved if n not in own)] if own.get(n) != saved.get(n)]
    if different:
        name = different[0]
        problems.append(
            f"the checkpoint is of another model: {len(different)} tensors differ, {name} is "
            f"{saved.get(name, 'absent')} there and {own.get(name, 'absent')} here"
        )
    before = checkpoint.get("lipdp_optimizers")
    if optimizer is not None and before and before[0]["class"] != type(optimizer).__name__:
        problems.append(
            f"the checkpoint holds the state of {before[0]['class']}, and {type(optimizer).__name__} is configured"
        )
    if problems:
        hint = "HINT: continue with the model and optimizer of the run's config.yaml, or use a new --run_dir."
        raise ValueError(f"{'; '.join(problems)}. {hint}")


def apply_changes(optimizer: Optimizer, was: Mapping[str, Any], now: Mapping[str, Any], scheduled: bool) -> None:
    """Gives a restored optimizer the hyper-parameters that have changed in the configuration since the run's start.

    Unchanged ones continue from the checkpoint, as does a learning rate that a scheduler sets.
    """
    for group, old, new in zip(optimizer.param_groups, was["groups"], now["groups"], strict=True):
        for name, value in new.items():
            if repr(old.get(name)) != repr(value) and not (scheduled and name in _SCHEDULED):
                group[name] = value


@dataclass(frozen=True)
class Restored:
    """The parts of a checkpoint that a continued run restores, besides Lightning's part.

    Attributes:
        run: The budget's state; None if the run cannot be continued from the checkpoint.
        statistics: The statistics that were released before the first step.
        norms: The state of the followed norms of weights.
        record: The state of the record of steps.
    """

    run: ResumeState | None = None
    statistics: Mapping[str, Tensor] | None = None
    norms: Mapping[str, Any] | None = None
    record: RecordState | None = None

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> Restored:
        """Returns the parts of a checkpoint; raises ValueError if a part is not one that a run writes."""
        return cls(
            ResumeState.from_dict(checkpoint["lipdp"]).checked() if "lipdp" in checkpoint else None,
            checkpoint.get(STATISTICS),
            checkpoint.get("lipdp_norms"),
            RecordState.from_dict(checkpoint["lipdp_record"]) if "lipdp_record" in checkpoint else None,
        )


def resume_parts(steps: Any, number: int) -> dict[str, Any]:
    """Returns what a checkpoint holds for the run to continue from the step of that number.

    Args:
        steps: The Strategy or the Engine that takes the steps.
        number: The number of the next step.
    """
    # a replay draws noise from the same keys, so it must scale the noise by the same bounds
    parts: dict[str, Any] = {"lipdp_norms": steps._norms.state()}
    if steps.ranks.rank == 0:  # the only rank that writes, and that needs access to the run directory
        steps.record.flush()  # a power failure must not leave a checkpoint ahead of it
        parts["lipdp_record"] = steps.record.state().to_dict()
        parts["lipdp"] = steps.branches.state(number, steps.mechanism.state()).to_dict()
    return parts


class CheckpointStrategy(ProcessStrategy):
    """Saves and restores secret, ledger, bounds and released statistics along with the weights that are trained."""

    mechanism: Mechanism | None
    branches: Branches
    record: StepRecord
    statistics: Statistics
    restored: Restored
    average: WeightAverage | None
    configured: list[dict[str, Any]]
    _norms: Follower

    def _trained_weights(self) -> AbstractContextManager[None]:
        """Puts the trained weights into the network for a block, also while an evaluation uses their average."""
        return nullcontext() if self.average is None else self.average.trained_weights()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the trained weights, also while their average is evaluated."""
        with self._trained_weights():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint; one to resume from holds the secret, and a weights-only one never does."""
        if self.mechanism is not None and "optimizer_states" in checkpoint:
            checkpoint |= resume_parts(self, self.connected.trainer.global_step)
            checkpoint["lipdp_optimizers"] = self.configured
        if self.statistics.values:  # released, and part of the model: no input can be prepared without them
            checkpoint[STATISTICS] = dict(self.statistics.values)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint, keeps the parts that the run restores, and sets Lightning's loops after its steps."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if "loops" in checkpoint:
            continue_after(checkpoint["loops"]["fit_loop"], checkpoint["global_step"], self)
        self.restored = Restored.of(checkpoint)
        return checkpoint

    def on_train_start(self) -> None:
        super().on_train_start()
        # the loops have found their place; Lightning would leave schedules that follow a metric where they are at the
        # end of an epoch that is continued
        self.connected.trainer.fit_loop._restarting = False

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Restores the weights; raises ValueError if they belong to another model."""
        check_fits(checkpoint, self.connected)
        # Lightning does so only after loading, and 64-bit weights would come back rounded to 32
        self.precision_plugin.convert_module(self.connected)
        super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer; where each rank has a part of it, rank 0 returns the whole."""
        state = super().optimizer_state(optimizer)
        return self._whole_state(state) if self.mechanism is not None and self.mechanism.owners else state

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restores the state, and the hyper-parameters that have not changed in the configuration."""
        super().load_optimizer_state_dict(checkpoint)
        for parameter, owner in ({} if self.mechanism is None else self.mechanism.owners).items():
            for optimizer in self.optimizers if owner != self.global_rank else ():
                optimizer.state.pop(parameter, None)
        before = checkpoint.get("lipdp_optimizers", self.configured)
        for optimizer, was, now in zip(self.optimizers, before, self.configured, strict=True):
            apply_changes(optimizer, was, now, scheduled=bool(self.lr_scheduler_configs))
