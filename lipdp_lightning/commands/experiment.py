"""From a YAML file and options to a module, data, plan and trainer: LightningCLI with a privacy group."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from callbacks import GradientNoiseMonitor, PrivacyAccountant, PrivacyReport, ResumeCheckpoint, RunFiles
from data_modules.base import PrivateDataModule

from ..privacy.branches import Branches
from ..privacy.plan import PrivacyPlan
from ..training.guards import steps_per_epoch
from ..training.module import PrivateModule
from ..training.run_directory import RunDirectory
from ..training.settings import PrivacySettings
from ..training.strategy import PrivateStrategy

VALIDATIONS_PER_RUN = 20


class Experiment(LightningCLI):
    """The groups model, data, privacy, optimizer, lr_scheduler and trainer, and what is derived from them."""

    plan: PrivacyPlan

    def __init__(self, arguments: Sequence[str], directory: RunDirectory | None, wandb: str = "auto") -> None:
        self._directory, self._wandb = directory, wandb
        super().__init__(
            PrivateModule,
            PrivateDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=True,
            trainer_defaults={"num_sanity_val_steps": 0, "use_distributed_sampler": False, "max_epochs": None},
            run=False,
            args=list(arguments),
            parser_kwargs={"exit_on_error": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(PrivacySettings, "privacy")

    @property
    def settings(self) -> PrivacySettings:
        settings: PrivacySettings = self.config_init["privacy"]
        return settings

    def resolved(self) -> str:
        """The complete configuration as YAML."""
        return str(self.parser.dump(self.config, skip_none=False))

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.plan = self.settings.plan(self.datamodule.dataset_size, self.model.input_bound)
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        chosen = self._get(self.config_init, "trainer", default={})
        options = {k: v for k, v in dict(chosen).items() if v is not None or k == "logger"}
        strategy = options.pop("strategy", "auto")
        options["strategy"] = self._strategy(strategy)
        options["max_steps"], options["max_epochs"] = self._length(options), -1
        options.setdefault("check_val_every_n_epoch", self._validate_every())
        user = options.pop("callbacks", None) or []
        callbacks = [*(user if isinstance(user, list) else [user]), *self._callbacks()]
        options["callbacks"] = callbacks
        options["enable_checkpointing"] = any(isinstance(c, lightning.pytorch.callbacks.Checkpoint) for c in callbacks)
        if options.get("logger") in (None, True):
            options["logger"] = self._loggers()
        if self._directory is not None:
            options["default_root_dir"] = str(self._directory.path)
        return lightning.Trainer(**options)

    def _strategy(self, given: Any) -> PrivateStrategy:
        if isinstance(given, PrivateStrategy):
            strategy = given
        elif given in ("auto", "private", "ddp"):
            strategy = PrivateStrategy()
        else:
            raise ValueError(
                f"trainer.strategy={given!r} cannot hold the private step: sharded and other strategies reduce or split "
                "gradients before noise is added. HINT: leave it out, or use lipdp_lightning.training.PrivateStrategy."
            )
        strategy.plan = self.plan
        strategy.physical_batch_size = self.settings.physical_batch_size
        strategy.noise_mode = self.settings.noise_mode
        strategy.public_context = self.resolved().encode()
        if self._directory is not None:
            strategy.branches = Branches(self._directory.ledger)
        return strategy

    def _length(self, options: dict[str, Any]) -> int:
        """Steps to take: the plan's, or fewer where the trainer is given fewer."""
        epochs, steps = options.get("max_epochs"), options.get("max_steps", -1)
        wanted = [steps] if steps not in (None, -1) else []
        if epochs not in (None, -1):
            wanted.append(epochs * steps_per_epoch(self.plan))
        too_many = [w for w in wanted if w > self.plan.steps]
        if too_many:
            raise ValueError(
                f"the trainer is asked for {max(too_many)} steps, and the budget allows {self.plan.steps}. "
                "HINT: set privacy.epochs or privacy.steps, to which the noise is calibrated, and leave trainer.max_epochs out."
            )
        return min([self.plan.steps, *wanted])

    def _validate_every(self) -> int:
        return max(1, self.plan.steps // steps_per_epoch(self.plan) // VALIDATIONS_PER_RUN)

    def _callbacks(self) -> list[lightning.Callback]:
        callbacks: list[lightning.Callback] = [PrivacyAccountant(), GradientNoiseMonitor()]
        if self._directory is not None:
            title = f"{type(self.model.network).__name__} on {type(self.datamodule).__name__}"
            callbacks += [
                RunFiles(self._directory, self.resolved()),
                PrivacyReport(self._directory.path, title=title, config=self.resolved()),
                ResumeCheckpoint(self._directory.checkpoint.parent),
            ]
        return callbacks

    def _loggers(self) -> list[Any] | bool:
        if self._directory is None:
            return False
        from lightning.pytorch.loggers import CSVLogger

        loggers: list[Any] = [CSVLogger(self._directory.path, name="", version="csv")]
        if self._wandb != "off":
            loggers.append(wandb_logger(self._directory.path, self._wandb))
        return loggers


def wandb_logger(directory: Path, mode: str) -> Any:
    """Offline unless a key is set or online is asked for; the run's id stays the same when it is continued."""
    from lightning.pytorch.loggers import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")
    offline = mode == "offline" or (mode == "auto" and not os.environ.get("WANDB_API_KEY"))
    identity = directory.resolve().name[-60:].replace("/", "-")
    return WandbLogger(
        project="lipdp", name=directory.name, save_dir=str(directory), offline=offline, id=identity, resume="allow"
    )


def parse_experiment(arguments: Sequence[str], directory: RunDirectory | None, wandb: str = "auto") -> Experiment:
    """An Experiment, with parser errors turned into one-line ValueErrors."""
    from jsonargparse import ArgumentError

    with _quiet():
        try:
            return Experiment(arguments, directory, wandb)
        except ArgumentError as error:
            raise ValueError(f"{_first_cause(str(error))} HINT: `lipdp fit --print_config` shows every key.") from error


def _first_cause(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines)[:600]


@contextlib.contextmanager
def _quiet() -> Any:
    """Lightning's advice on launchers and devices says nothing about this run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*srun.*")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        yield

