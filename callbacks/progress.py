"""Shows the progress of a private run: one bar over all steps in a terminal, or lines in a log file."""

from __future__ import annotations

import sys
from typing import Any

import lightning
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from lipdp_lightning.bound_text import ShownBound
from lipdp_lightning.report.formats import clean_text, format_duration
from lipdp_lightning.training.progress_note import Pace

LINES_PER_RUN = 20


class _Rate(ProgressColumn):
    """The steps per second of the last half minute."""

    def render(self, task: Task) -> Text:
        """Returns the rate, or a dash where it is not known yet."""
        return Text("-" if task.speed is None else f"{task.speed:.3g} steps/s")


class PrivateProgressBar(ProgressBar):
    """Shows steps, epsilon so far, the last held-out metric, the rate and the time that remains.

    A terminal gets one bar for the whole run, whatever its epochs are. If the output is no terminal (a log of a batch
    system), a line is written after each validation instead, and about twenty in a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._written = -1
        self._pace = Pace(0)
        self._last: dict[str, float] = {}

    def disable(self) -> None:
        """Shows nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Shows progress again."""
        self._enabled = True

    def get_metrics(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
        """Returns the values to show, with epsilon rounded up."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        epsilon = metrics.get("epsilon")
        if isinstance(epsilon, int | float):  # formatting it would round to nearest, perhaps down
            metrics["epsilon"] = ShownBound(epsilon)
        return metrics

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._last, self._written, self._pace = {}, -1, Pace(trainer.global_step)
        if not (self._enabled and trainer.is_global_zero and sys.stdout.isatty()):
            return
        columns = (MofNCompleteColumn(), TextColumn("{task.description}", markup=False), _Rate())
        self._bar = Progress(TextColumn("step"), BarColumn(), *columns, TimeRemainingColumn(), refresh_per_second=4)
        self._bar.add_task("", total=trainer.max_steps, completed=trainer.global_step)
        self._bar.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None or trainer.global_step - max(self._written, 0) >= trainer.max_steps / LINES_PER_RUN:
            self._show(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.training or (trainer.validating and trainer.state.fn == "fit"):
            self._show(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._bar is not None:
            self._show(trainer, pl_module)
        self._close()

    def on_exception(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero or trainer.sanity_checking:
            return
        metrics = self.get_metrics(trainer, module)
        self._last |= {k: v for k, v in metrics.items() if isinstance(v, int | float)}  # none is new in each step
        shown = clean_text("  ".join(f"{name}={value:.4g}" for name, value in self._last.items()))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step, description=shown)
        elif trainer.global_step != self._written:
            self._written = trainer.global_step
            sys.stdout.write(f"step {trainer.global_step}/{trainer.max_steps}  {shown}{self._written_pace(trainer)}\n")
            sys.stdout.flush()

    def _written_pace(self, trainer: lightning.Trainer) -> str:
        """Returns the rate since the run was started or continued, and the time that the other steps take at it."""
        rate = self._pace.rate(trainer.global_step)
        if rate is None:
            return ""
        return f"  {rate:.3g} steps/s  {format_duration((trainer.max_steps - trainer.global_step) / rate)} left"
