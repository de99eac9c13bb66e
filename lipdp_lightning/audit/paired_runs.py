"""Trains on a data set, then without one example and given everything that the first run released.

The second run draws the same sample less the example, and its mechanisms hand out the outputs of the first run in place
of their own. Both runs then start every step from the same state, and the inputs of every mechanism can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer

from ..mechanism.noise import StepNoise, Sum
from ..mechanism.reductions import Reduce
from ..mechanism.step import Mechanism
from ..privacy.plan import PrivacyPlan
from ..privacy.sampling import local_slice, poisson_sample
from ..privacy.statistics import Statistics, Terms, bounded_sum
from ..training.batches import planned_draws
from ..training.strategy import PrivateStrategy
from .transcript import Comparison, Release, Transcript, compare, text_of


class Scribe:
    """Writes the transcript of one run.

    Args:
        given: the transcript whose outputs are handed out in place of the run's own.
        absent: the place of the left-out example in the whole data set; None for the run on the whole.
    """

    def __init__(self, given: Transcript | None = None, absent: int | None = None) -> None:
        self._given = {} if given is None else given.outputs()
        self.absent = absent
        self._releases: list[Release] = []
        self._shown: list[tuple[str, str]] = []

    def given(self, name: str) -> tuple[Tensor, ...] | None:
        """Returns the outputs to hand out; None where the mechanism's own are used."""
        return self._given.get(name)

    def released(self, release: Release) -> None:
        self._releases.append(release)

    def show(self, name: str, value: Any) -> None:
        """Records something that can be seen of the run."""
        self._shown.append((name, text_of(value)))

    def transcript(self) -> Transcript:
        return Transcript(tuple(self._releases), tuple(self._shown))


def paired_runs(
    run: Callable[[Scribe], None], absent: int, plan: PrivacyPlan, rows: int, secret: bytes, steps: int | None = None
) -> Comparison:
    """Trains on the whole data set and without one example, and compares the two runs.

    Args:
        run: trains under the given scribe, on the data set without row ``scribe.absent`` unless that is None.
        absent: the row that the second run leaves out.
        plan: the plan of both runs.
        rows: the number of rows of the whole data set.
        secret: the fixed secret of both runs.
        steps: how many of the plan's steps are taken; None for all.

    Raises:
        Exception: an error that both runs raise at the same point and in the same words. An error that follows the data
            is visible to whoever runs the training, and is a fault instead.
    """
    first = Scribe()
    error = _error_of(run, first)
    second = Scribe(first.transcript(), absent)
    _error_of(run, second)
    touched = touched_releases(absent, plan, rows, secret, plan.steps if steps is None else steps)
    found = compare(first.transcript(), second.transcript(), touched)
    if error is not None and not found.faults:
        raise error
    return found


def _error_of(run: Callable[[Scribe], None], scribe: Scribe) -> Exception | None:
    """Returns the error that ends the run, which is then part of what the run shows, or None."""
    try:
        run(scribe)
    except Exception as error:
        scribe.show("error", f"{type(error).__name__}: {error}")
        return error
    return None


def touched_releases(absent: int, plan: PrivacyPlan, rows: int, secret: bytes, steps: int) -> set[str]:
    """Returns the names of the releases that a row takes part in: all statistics, and the steps whose sample
    it is in.
    """
    drawn = {
        step_name(step)
        for step in range(steps)
        if bool((poisson_sample(secret, step, rows, plan.sample_rate) == absent).any())
    }
    return drawn | {statistic_name(label) for label, _ in plan.preliminary}


def step_name(step: int) -> str:
    return f"step {step}"


def statistic_name(label: str) -> str:
    return f"statistic {label!r}"


class TranscribedStatistics(Statistics):
    """Records statistics, or hands out the given ones."""

    def __init__(self, scribe: Scribe) -> None:
        super().__init__()
        self._scribe = scribe

    def settle(
        self, plan: PrivacyPlan, terms: Callable[[str], Terms], saved: Mapping[str, Tensor] | None, started: bool,
        secret: bytes,
    ) -> dict[str, Tensor]:  # fmt: skip
        inputs = {label: bounded_sum(terms(label)) for label, _ in plan.preliminary}
        given = {label: self._scribe.given(statistic_name(label)) for label in inputs}
        known = {label: outputs[0] for label, outputs in given.items() if outputs is not None}
        values = super().settle(plan, terms, known or saved, started, secret)
        for label, level in plan.preliminary:
            deviations = torch.full_like(inputs[label], level)
            name = statistic_name(label)
            self._scribe.released(Release(name, inputs[label], deviations, level, (values[label],)))
        return values


class TranscribedStrategy(PrivateStrategy):
    """Runs the Strategy under a scribe.

    Examples keep their numbers in the whole data set, by which dropout masks and views are drawn; micro-batches and
    shares of processes are cut from the sample that is left.
    """

    def __init__(self, plan: PrivacyPlan | None = None, *, scribe: Scribe, **options: Any) -> None:
        super().__init__(plan, statistics=TranscribedStatistics(scribe), **options)
        self.scribe = scribe

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        absent, plan = self.scribe.absent, self.plan
        if absent is None:
            return super()._draw(rows)
        assert plan is not None
        whole = planned_draws(self._secret, plan, rows + 1, 0, 1, 1)

        def draw(step: int, chunk: int) -> Tensor:
            sample = whole(step, 0)
            own = local_slice(sample[sample != absent], self.global_rank, self.world_size, chunk, self.chunks)
            return own - (own > absent).to(own.dtype)

        return draw

    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        if self.mechanism is not None:
            self._transcribe(self.mechanism)

    def numbered(self, batch: Any) -> Any:
        if self.scribe.absent is None:
            return super().numbered(batch)
        x, y, ids = batch
        return x, y, ids + (ids >= self.scribe.absent).to(ids.dtype)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = self._steps_taken()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._show_state(f"after {step_name(step)}")
        return output

    def _steps_taken(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step

    def _transcribe(self, mechanism: Mechanism) -> None:
        """Records the sums at the one place where noise is added to them."""
        release, scribe, plan = mechanism._release, self.scribe, mechanism.plan

        def transcribed(sums: Sequence[Sum], noise: StepNoise, reduce: Reduce | None) -> None:
            name = step_name(self._steps_taken())
            inputs = torch.cat([one.total() for one in sums])
            if reduce is not None:
                reduce(inputs)
            for what in ("deviation", "share", "divisor"):
                scribe.show(f"{what} of {name}", [getattr(one, what) for one in sums])
            outputs = scribe.given(name)
            if outputs is None:
                release(sums, noise, reduce)
                outputs = tuple(one.values.clone() for one in sums)
            else:
                for one, output in zip(sums, outputs, strict=True):
                    one.values.copy_(output)
            spread = torch.cat([torch.full((one.values.numel(),), one.deviation, dtype=torch.float64) for one in sums])
            scribe.released(Release(name, inputs, spread.to(inputs.device), plan.step_noise_multiplier, outputs))

        mechanism._release = transcribed  # type: ignore[method-assign]

    def _show_state(self, when: str) -> None:
        """Records everything that the next step starts from, besides the data."""
        module, scribe, mechanism = self.lightning_module, self.scribe, self.mechanism
        assert mechanism is not None and module is not None
        for name, value in module.state_dict().items():
            scribe.show(f"{name} {when}", value)
        for index, optimizer in enumerate(self.optimizers):
            scribe.show(f"optimizer {index} {when}", optimizer.state_dict())
        for index, config in enumerate(self.lr_scheduler_configs):
            scribe.show(f"schedule {index} {when}", config.scheduler.state_dict())
        scribe.show(f"radii {when}", mechanism.state())
        scribe.show(f"torch's generator {when}", torch.get_rng_state())


class Seen(Callback):
    """Records what callbacks, loggers and progress bars are shown."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe, self._batches = scribe, 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        when = f"after batch {self._batches}"
        self._batches += 1
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            for name, value in getattr(trainer, kind).items():
                self._scribe.show(f"{name} of {kind} {when}", value)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            self._scribe.show(f"state of {type(callback).__name__} {when}", callback.state_dict())

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        numbers = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "batches": self._batches}
        for name, value in numbers.items():
            self._scribe.show(f"number of {name}", value)


class SeenLogger(Logger):
    """Records what a logger is given."""

    def __init__(self, scribe: Scribe) -> None:
        super().__init__()
        self._scribe = scribe

    @property
    def name(self) -> str:
        return "transcript"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._scribe.show(f"{name} logged at {step}", value)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._scribe.show("hyper-parameters", params)

    def log_image(self, key: str, images: list[Any], **kwargs: Any) -> None:
        for index, image in enumerate(images):
            self._scribe.show(f"image {index} of {key}", torch.as_tensor(image))
