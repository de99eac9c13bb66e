"""What a run's checkpoints hold besides Lightning's own, and how a run takes it up again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.branches import Branches, ResumeState
from ..privacy.statistics import Statistics
from .averaging import WeightAverage
from .processes import ProcessStrategy
from .release import STATISTICS
from .resume import apply_changes, check_fits
from .step_record import StepRecord


class CheckpointStrategy(ProcessStrategy):
    """Saves and restores secret, ledger, bounds and released statistics along with the weights that are trained."""

    mechanism: Mechanism | None
    branches: Branches
    record: StepRecord
    statistics: Statistics
    restored: ResumeState | None
    average: WeightAverage | None
    configured: list[dict[str, Any]]
    _norms: Follower
    _restored_statistics: dict[str, Tensor] | None
    _restored_norms: dict[str, Any] | None

    def _trained_weights(self) -> AbstractContextManager[None]:
        """The weights that steps are taken from, also while an evaluation looks at their average."""
        return nullcontext() if self.average is None else self.average.trained_weights()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._trained_weights():
            return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Checkpoints to resume from carry the secret; weights-only ones never do."""
        if self.mechanism is not None and "optimizer_states" in checkpoint:
            step = self.lightning_module.trainer.global_step
            # bounds of later steps scale noise that is drawn from a fixed key: a replay must have the same
            checkpoint["lipdp_norms"] = self._norms.state()
            if self.is_global_zero:  # the only one that writes, and that needs to see the run directory
                self.record.flush()  # a power failure must not leave a checkpoint ahead of it
                checkpoint["lipdp"] = self.branches.state(step, self.mechanism.state()).to_dict()
            checkpoint["lipdp_optimizers"] = self.configured
        if self.statistics.values:  # released, and part of the model: no input can be prepared without them
            checkpoint[STATISTICS] = dict(self.statistics.values)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.restored = ResumeState.from_dict(checkpoint["lipdp"]).checked() if "lipdp" in checkpoint else None
        self._restored_statistics = checkpoint.get(STATISTICS)
        self._restored_norms = checkpoint.get("lipdp_norms")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        check_fits(checkpoint, self.lightning_module)
        # Lightning does so only after loading, and 64-bit weights would come back rounded to 32
        self.precision_plugin.convert_module(self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The state, and of the hyper-parameters those that the configuration does not change."""
        super().load_optimizer_state_dict(checkpoint)
        before = checkpoint.get("lipdp_optimizers", self.configured)
        for optimizer, was, now in zip(self.optimizers, before, self.configured, strict=True):
            apply_changes(optimizer, was, now, scheduled=bool(self.lr_scheduler_configs))
