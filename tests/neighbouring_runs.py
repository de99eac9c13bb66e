"""A small data set, the same without one row, and runs on both by the real Trainer that are seen from all sides."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from small_runs import SECRET, fit, make_module, make_plan
from torch import Tensor, nn

from lipdp_lightning.audit.paired_runs import Scribe, Seen, SeenLogger, TranscribedStrategy, paired_runs
from lipdp_lightning.audit.transcript import Comparison
from lipdp_lightning.callbacks import GradientNoiseMonitor, PrivacyAccountant, PrivacyReport, ResumeCheckpoint
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.poisson import InMemoryRows
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.privacy.sampling import poisson_sample
from lipdp_lightning.privacy.statistics import Terms
from lipdp_lightning.training import PrivateModule

ROWS, CLASSES = 24, 3
MEANS = (("mean of rows", 5.0),)
_SECRET = ("secret", "context", "id", "directory", "last")  # of checkpoints that only the run's owner can read
_KEYED = re.compile(r"\b([0-9a-f]{16}|[0-9a-f]{32})\b")  # in records: digests under the run's secret
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?([+-]\d\d:\d\d)?")
_RECORDS = ("ledger.json", "steps.txt")


class Pair(PrivateDataModule):
    """Images of 2 x 3 on the sphere; ``absent`` is the row that is left out, in the middle of the others."""

    input_shape = (1, 2, 3)
    task = "classification"
    num_classes = CLASSES
    declared_size = ROWS

    def __init__(self, absent: int | None) -> None:
        super().__init__()
        self.absent = absent

    def _rows(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, 1, 2, 3, generator=generator)
        return x / x.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1), torch.randint(CLASSES, (ROWS,), generator=generator)

    def load_train(self) -> tuple[Tensor, Tensor]:
        x, y = self._rows(0)
        kept = torch.arange(ROWS) != (-1 if self.absent is None else self.absent)
        return x[kept], y[kept]

    def load_test(self) -> tuple[Tensor, Tensor]:
        return self._rows(1)


class PairWithMeans(Pair):
    """The mean of the rows is released before the first step, and removed from every row."""

    preliminary = MEANS

    def __init__(self, absent: int | None) -> None:
        super().__init__(absent)
        self.mean: Tensor | None = None

    def statistic_terms(self, label: str) -> Terms:
        return Terms(6, [super()._ready().x.flatten(1)])

    def use_statistics(self, values: Any) -> None:
        self.mean = values["mean of rows"].float().reshape(self.input_shape)

    def _ready(self) -> InMemoryRows:
        assert self.mean is not None
        return super()._ready()

    def transform_batch(self, x: Tensor) -> Tensor:
        return x if self.mean is None else x - self.mean


class OneLarge(Pair):
    """The row that is left out is the only one on the sphere; the others are a hundred times smaller."""

    batch_size = 8

    def _rows(self, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(seed)
        others = torch.arange(ROWS) != row_of_choice(pair_plan(expected_batch_size=self.batch_size))
        return torch.where(others.reshape(-1, 1, 1, 1), 0.01 * x, x), y


def pair_plan(**options: Any) -> PrivacyPlan:
    chosen: dict[str, Any] = {"dataset_size": ROWS, "expected_batch_size": 3, "steps": 24} | options
    return make_plan(**chosen)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 2), MaxMin(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(8, CLASSES))


def one_layer() -> nn.Module:
    """An example's gradient is proportional to its input."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES, bias=False))


def dropped_inputs() -> nn.Module:
    """Dropout of the inputs, which changes an example's gradient as much as it can be changed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(6, CLASSES, bias=False))


def samples(plan: PrivacyPlan) -> list[list[int]]:
    return [poisson_sample(SECRET, step, ROWS, plan.sample_rate).tolist() for step in range(plan.steps)]


def row_of_choice(plan: PrivacyPlan) -> int:
    """A row in the middle that is drawn often, and once by itself, so that a step is empty without it."""
    drawn = samples(plan)
    lonely = {sample[0] for sample in drawn if len(sample) == 1} - {0, ROWS - 1}
    candidates = lonely or set(range(1, ROWS - 1))
    return max(sorted(candidates), key=lambda row: sum(row in sample for sample in drawn))


def compared(
    folder: Path,
    plan: PrivacyPlan,
    *,
    data: Callable[[int | None], PrivateDataModule] = Pair,
    module: Callable[[], PrivateModule] = lambda: make_module(network=network()),
    strategy: type[TranscribedStrategy] = TranscribedStrategy,
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    **options: Any,
) -> Comparison:
    """Train on both data sets with report, records, checkpoints and a logger; everything is compared."""
    absent = row_of_choice(plan)

    def run(scribe: Scribe) -> None:
        directory = folder / ("whole" if scribe.absent is None else "without")
        train(scribe, directory, plan, data(scribe.absent), module(), strategy, callbacks(), **options)

    return paired_runs(run, absent, plan, ROWS, SECRET)


def train(
    scribe: Scribe,
    directory: Path,
    plan: PrivacyPlan,
    data: PrivateDataModule,
    module: PrivateModule,
    strategy: type[TranscribedStrategy],
    callbacks: Sequence[Callback],
    **options: Any,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)  # every process of a run does so
    torch.manual_seed(0)
    watching = [
        PrivacyAccountant(1), GradientNoiseMonitor(1), PrivacyReport(directory), *callbacks,
        ResumeCheckpoint(directory / "checkpoints", every_n_steps=5), Seen(scribe),
    ]  # fmt: skip
    chosen = {"logger": SeenLogger(scribe), "log_every_n_steps": 1} | options.pop("trainer", {})
    chosen |= {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1}
    with captured(scribe):
        _, trainer = fit(
            plan, *watching, module=module, data=data, directory=directory, trainer_options=chosen, scribe=scribe,
            strategy_kind=strategy, **options,
        )  # fmt: skip
    if trainer.is_global_zero:
        show_files(scribe, directory)


@contextlib.contextmanager
def captured(scribe: Scribe) -> Iterator[None]:
    """Put on record what is printed and logged, also where the run ends with an error."""
    printed, errors, logged = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    # processes find each other once, and train twice
    handler.addFilter(lambda record: not record.getMessage().startswith("Initializing distributed"))
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        for name, stream in (("printed", printed), ("standard error", errors), ("logging", logged)):
            scribe.show(name, stream.getvalue())


def show_files(scribe: Scribe, directory: Path) -> None:
    """Put every file of a run on record, without what its owner alone can read and without the time of day."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.suffix == ".ckpt":
            saved = torch.load(path, weights_only=False)
            for key in sorted(saved):
                scribe.show(f"{key} of {name}", without_secrets(saved[key]))
        elif path.is_file():
            for number, line in enumerate(path.read_text(errors="replace").splitlines()):
                line = _TIME.sub("TIME", line.replace(str(directory), "RUN"))
                scribe.show(f"line {number} of {name}", _KEYED.sub("KEYED", line) if path.name in _RECORDS else line)


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if k not in _SECRET}
    return [without_secrets(v) for v in value] if isinstance(value, list | tuple) else value
