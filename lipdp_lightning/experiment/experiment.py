"""Builds module, data, plan and trainer from a YAML file and options: LightningCLI with a privacy group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from ..bounds.losses import Loss
from ..callbacks import (
    GradientNoiseMonitor,
    Preemption,
    PrivacyAccountant,
    PrivacyReport,
    PrivateProgressBar,
    ResumeCheckpoint,
    RunFiles,
)
from ..data_modules.base import PrivateDataModule
from ..extras import is_installed
from ..privacy.branches import Branches
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from ..schedules import PlannedSchedule
from ..training.automatic_scaling import settle
from ..training.checkpoints import check_fits
from ..training.claim import claim_run
from ..training.model_checks import optimizers_of
from ..training.module import PrivateModule
from ..training.run_directory import RunDirectory
from ..training.set_up import refuse_strategy, steps_per_epoch
from ..training.settings import PrivacySettings
from ..training.step_record import StepRecord
from ..training.strategy import PrivateStrategy
from .class_paths import Constructors, failed_import, import_problem, optimizer_problem
from .config_file import check_config_file, config_files
from .declared_shapes import fill_shapes
from .known_keys import known_keys
from .parser_errors import parser_error
from .quiet import quiet
from .saved_yaml import use_saved_yaml
from .short_names import PARSER_MODE, with_full_words
from .trainer_options import make_trainer, refuse_trainer_options
from .unfilled import refuse_unfilled

DEFAULTS = {
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "max_epochs": None,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
}
VALIDATIONS_PER_RUN = 20
SAVES_PER_RUN = 100

# losses are dataclasses, whose subclasses jsonargparse accepts only when told so
set_parsing_settings(subclasses_enabled=[Loss])
use_saved_yaml(PARSER_MODE)


class Experiment(LightningCLI):
    """The groups model, data, privacy, optimizer, lr_scheduler and trainer, and the objects derived from them."""

    plan: PrivacyPlan
    scaling_reason: str

    def __init__(self, arguments: Sequence[str], directory: RunDirectory | None, wandb: str = "auto") -> None:
        self._directory, self._wandb = directory, wandb
        super().__init__(
            PrivateModule,
            PrivateDataModule,
            subclass_mode_data=True,
            save_config_callback=None,
            # the seed decides the initial weights only; sampling and noise come from the run's secret
            seed_everything_default=0,
            trainer_defaults=DEFAULTS,
            run=False,
            args=with_full_words(arguments),
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, "parser_mode": PARSER_MODE},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(PrivacySettings, "privacy")
        parser.add_argument(
            "--lr_interval", type=Literal["epoch", "step"], default="epoch",
            help="when a torch lr_scheduler moves; an epoch has the steps that draw each row once on average",
        )  # fmt: skip

    def configure_optimizers(  # type: ignore[override]
        self, lightning_module: lightning.LightningModule, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        """Adds the schedule's interval to Lightning's own result, and passes the plan's steps to schedules that need
        them.
        """
        configured = LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)
        if not isinstance(configured, tuple):  # no schedule, or one that follows a metric
            return configured
        if isinstance(lr_scheduler, PlannedSchedule):
            lr_scheduler.plan_steps(self.plan.steps)
        interval = getattr(lr_scheduler, "interval", self.config_init["lr_interval"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": interval}}

    @property
    def settings(self) -> PrivacySettings:
        settings: PrivacySettings = self.config_init["privacy"]
        return settings.of_unit(self.datamodule.unit, self.datamodule.max_examples_per_unit)

    def resolved(self) -> str:
        """Returns the complete configuration as YAML."""
        return str(self.parser.dump(self.config, skip_none=False))

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise ValueError(f"seed_everything: {error}. HINT: give a number from 0 to 4294967295.") from error

    def instantiate_classes(self) -> None:
        make = Constructors(self)
        fill_shapes(self.config, make)
        self.config_init = make.make_all()
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._make_optimizer()
        if self.datamodule.dataset_size < 1:
            self.datamodule.setup()  # raises and names the declaration that is wrong
        self.plan, self.scaling_reason = self._settled(self.make_plan())
        self.trainer = self.instantiate_trainer()

    def make_plan(self) -> PrivacyPlan:
        """Returns the plan of the configuration, for the N that the data module declares."""
        data = self.datamodule
        return self.settings.plan(data.dataset_size, self.model.input_bound, data.preliminary)

    def _settled(self, plan: PrivacyPlan) -> tuple[PrivacyPlan, str]:
        """Returns the plan with its scaling, and the reason; a network without a certificate is refused in set-up."""
        try:
            return settle(plan, self.model, self.datamodule, self.settings.leaves_norm_open)
        except ValueError:
            return plan, ""

    def _make_optimizer(self) -> None:
        try:
            self._add_configure_optimizers_method_to_model(self.subcommand)
        except Exception as error:
            raise ValueError(optimizer_problem(error, bool(self.config.get("lr_scheduler")))) from error

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        chosen = self._get(self.config_init, "trainer", default={})
        refuse_trainer_options(chosen)
        options = {k: v for k, v in dict(chosen).items() if v is not None or k == "logger"}
        strategy = options.pop("strategy", "auto")
        options["strategy"] = self._strategy(strategy)
        options["max_steps"], options["max_epochs"] = self._length(options), -1
        if isinstance(options.get("val_check_interval"), int):
            options.setdefault("check_val_every_n_epoch", None)  # so that batches are counted across epochs
        options.setdefault("check_val_every_n_epoch", self._validate_every())
        given = options.pop("callbacks", None) or []
        callbacks = self._callbacks(given if isinstance(given, list) else [given], options)
        options["callbacks"] = callbacks
        options["enable_checkpointing"] = any(isinstance(c, lightning.pytorch.callbacks.Checkpoint) for c in callbacks)
        if options.get("logger") in (None, True):
            options["logger"] = self._loggers()
        if self._directory is not None:
            options["default_root_dir"] = str(self._directory.path)
        return make_trainer(options)

    def _strategy(self, given: Any) -> PrivateStrategy:
        if isinstance(given, PrivateStrategy):
            strategy = given
        elif given in ("auto", "private", "ddp"):
            strategy = PrivateStrategy()
        else:
            raise refuse_strategy(given)
        folder = self._directory
        strategy.configure(
            self.plan, self.settings.physical_batch_size, self.settings.noise_mode,
            branches=None if folder is None else Branches(folder.ledger),
            record=None if folder is None else StepRecord(folder.steps),
            statistics=None if folder is None else Statistics(folder.statistics),
            deterministic=self.settings.deterministic, tf32=self.settings.tf32, public_context=self.resolved().encode(),
            scaling_reason=self.scaling_reason,
        )  # fmt: skip
        return strategy

    def _length(self, options: dict[str, Any]) -> int:
        """Returns the steps to take: the plan's, or fewer if the trainer is given fewer."""
        epochs, steps = options.get("max_epochs"), options.get("max_steps", -1)
        wanted = [steps] if steps not in (None, -1) else []
        if epochs not in (None, -1):
            wanted.append(epochs * steps_per_epoch(self.plan))
        too_many = [w for w in wanted if w > self.plan.steps]
        if too_many:
            raise ValueError(
                f"the trainer is asked for {max(too_many)} steps, and the budget allows {self.plan.steps}. "
                "HINT: set privacy.epochs or privacy.steps, which the noise is calibrated to; leave max_epochs out."
            )
        return min([self.plan.steps, *wanted])

    def _validate_every(self) -> int:
        return max(1, self.plan.steps // steps_per_epoch(self.plan) // VALIDATIONS_PER_RUN)

    def _save_every(self) -> int:
        return max(10, self.plan.steps // SAVES_PER_RUN)

    def _callbacks(self, given: list[Any], options: dict[str, Any]) -> list[Any]:
        """Returns the callbacks of the configuration, and the usual ones that it does not configure itself."""
        usual: list[Any] = [PrivacyAccountant(), GradientNoiseMonitor()]
        if self._directory is not None:
            title = f"{type(self.model.network).__name__} on {type(self.datamodule).__name__}"
            config = self.resolved()
            usual += [
                ResumeCheckpoint(every_n_steps=self._save_every()),
                PrivacyReport(self._directory.path, title=title, config=config, publish=False),
                RunFiles(self._directory, config),
                Preemption(),
            ]
        has_bar = any(isinstance(c, lightning.pytorch.callbacks.ProgressBar) for c in given)
        if not has_bar and options.get("enable_progress_bar", True):
            usual.append(PrivateProgressBar())
        callbacks = [*given, *(c for c in usual if not any(type(g) is type(c) for g in given))]
        for callback in callbacks:
            if isinstance(callback, ResumeCheckpoint) and callback.directory is None and self._directory is not None:
                callback.directory = self._directory.checkpoint.parent
        return sorted(callbacks, key=lambda c: isinstance(c, Preemption))  # it must run last, since it may end the step

    def _loggers(self) -> list[Any] | bool:
        if self._directory is None:
            return False
        from .loggers import RunCSVLogger, wandb_logger

        loggers: list[Any] = [RunCSVLogger(self._directory.path)]
        if self._wandb != "off" and (self._wandb != "auto" or is_installed("wandb")):
            tags = [type(self.model.network).__name__, type(self.datamodule).__name__, self.plan.scaling]
            tags.append("certified" if self.plan.certified else "not private")
            loggers.append(wandb_logger(self._directory.path, self._directory.id, self._wandb, tags))
        return loggers

    def callback(self, kind: type[Any]) -> Any:
        """Returns the trainer's callback of a class."""
        return next(c for c in self.trainer.callbacks if isinstance(c, kind))  # type: ignore[attr-defined]

    def claim(self) -> str | None:
        """Checks everything, then takes the run directory; returns the checkpoint to continue from, if there is one."""
        assert self._directory is not None
        checkpoint = claim_run(
            self._directory, self.plan, self.trainer.is_global_zero, self._check,
            lambda saved: check_fits(saved, self.model, optimizers_of(self.model)[0]), self.resolved(),
        )  # fmt: skip
        return None if checkpoint is None else str(checkpoint)

    def _check(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, PrivateStrategy)
        strategy.check(self.trainer, self.model, self.datamodule)
        if self.plan.certified:
            strategy.spending.guarantee()  # raises where no accountant has a bound

    def release(self) -> None:
        """Releases the run directory."""
        if self._directory is not None:
            self._directory.release()


def parse_experiment(arguments: Sequence[str], directory: RunDirectory | None, wandb: str = "auto") -> Experiment:
    """Returns an Experiment; errors of the parser become one-line ValueErrors."""
    with quiet():
        return make_experiment(Experiment, arguments, directory, wandb)


def make_experiment(
    kind: type[Experiment], arguments: Sequence[str], directory: RunDirectory | None, wandb: str
) -> Experiment:
    """Returns what :func:`parse_experiment` does, without changing how warnings are shown."""
    from jsonargparse import ArgumentError

    for file in config_files(arguments):
        check_config_file(file)
    refuse_unfilled(arguments)
    try:
        return kind(arguments, directory, wandb)
    except ArgumentError as error:
        # the parser takes a module that fails while it is imported for a class of the wrong kind
        raise ValueError(failed_import(arguments) or parser_error(str(error), known_keys())) from error
    except (ValueError, OSError):
        raise
    except Exception as error:
        # importing a module that a class path names runs it, so it may raise anything
        raise ValueError(import_problem(error, arguments)) from error
