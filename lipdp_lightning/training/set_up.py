"""Checks of a training set-up before its first step, which report all problems at once."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, get_args

import lightning
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ThroughputMonitor,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor

from ..bounds.certifier import CertificationError, Certifier
from ..hints import with_hints_beside
from ..kernels.numeric_environment import check_exact_arithmetic, require_exact_arithmetic, require_repeated_bits
from ..mechanism.step import Mechanism
from ..mechanism.step_errors import Mode
from ..norms.follow import Follower
from ..norms.operators import NormSource, Operator
from ..privacy.keys import new_secret
from ..privacy.plan import PrivacyPlan
from ..slurm.environment import task_problems
from .batches import defined_here, transfer_problems
from .model_checks import DATA_METHODS, module_problems, output_problems, rehearsal_problems, strategy_problems
from .module import PrivateModule
from .views import view_problems

PRECISIONS = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.bfloat16}
GROWTH = 2.0  # how far norms that nothing limits may grow before a certificate overflows
_MONITORED = ("validation/", "epsilon", "nonprivate/")


def require_exact_products(device: torch.device, deterministic: bool = False) -> None:
    """Switches off TF32 and other reduced products in this process, which torch allows by default in convolutions.

    Args:
        device: The device on which the run trains.
        deterministic: Whether a GPU must repeat its bits; a CPU always does.

    Raises:
        ValueError: If the environment forces other products, or bits that do not repeat.
    """
    require_exact_arithmetic()
    check_exact_arithmetic()
    if deterministic and device.type == "cuda":
        require_repeated_bits()


def steps_per_epoch(plan: PrivacyPlan) -> int:
    """Returns the number of steps after which each example has been drawn once on average."""
    return max(1, round(1 / plan.sample_rate))


def matching_modules(network: torch.nn.Module, patterns: tuple[tuple[str, float], ...]) -> dict[str, float]:
    """Returns the radius of every leaf module that matches a pattern, by its path.

    Raises:
        ValueError: If a pattern matches no module.
    """
    leaves = [path for path, m in network.named_modules() if path and not list(m.children())]
    found: dict[str, float] = {}
    for pattern, radius in patterns:
        names = [path for path in leaves if fnmatchcase(path, pattern)]
        if not names:
            raise ValueError(
                f"cotangent_clip {pattern!r} matches no module. HINT: the modules are {', '.join(leaves)}."
            )
        for path in names:
            found.setdefault(path, radius)
    return found


def make_certifier(
    trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any, norms: NormSource | None = None
) -> Certifier:
    """Returns the certifier of a module under a plan, with its clipped loss, its cotangent clips and the precision."""
    kind: Any = Certifier
    if plan.clips_examples or plan.scaling == "none":
        from ..clipping.clipped_groups import ClippedGroups

        kind = partial(ClippedGroups, plan)
    with torch.compiler.set_stance("force_eager"):  # tracing needs the network's own code, not compiled code
        certifier: Certifier = kind(
            module.network, data.input_shape, module.input_bound, module.private_loss(plan.loss_clip),
            norms=norms, compute_dtype=PRECISIONS.get(str(trainer.precision), torch.float32),
            cotangent_caps=matching_modules(module.network, plan.cotangent_clip),
            tf32=getattr(trainer.strategy, "tf32", False),
        )  # fmt: skip
    return certifier


def check_set_up(trainer: lightning.Trainer, module: Any, strategy: Any, data: Any) -> None:
    """Raises one ValueError that lists all problems of a set-up, each with its HINT, if there are any."""
    problems = [
        *_plan(trainer, strategy),
        *_trainer(trainer, strategy),
        *_loggers(trainer),
        *_callbacks(trainer, module),
        *strategy_problems(strategy),
        *view_problems(trainer, strategy, data),
    ]
    refuse(problems + _step_problems(trainer, module, strategy, data))


def check_loop(engine: Any, module: PrivateModule, data: Any) -> None:
    """Raises one ValueError that lists all problems of a loop without a Trainer, each with its HINT, if there are any.

    Args:
        engine: The Engine, which takes the places of Strategy and Trainer.
        module: The module that is trained.
        data: The data module.
    """
    refuse([*_plan(engine, engine), *strategy_problems(engine), *_step_problems(engine, module, engine, data)])


def _step_problems(trainer: Any, module: Any, strategy: Any, data: Any) -> list[str]:
    """Returns the problems of the module, the data and the network's certificate."""
    problems = [*(wrong_module := module_problems(module)), *(wrong_data := _data(data, module, strategy.plan))]
    if not wrong_data:
        problems += _shares(trainer, data)
        for callback in trainer.callbacks:
            problems += getattr(callback, "set_up_problems", _none)(trainer, module, strategy.plan, data)
    if isinstance(module, PrivateModule) and strategy.plan is not None and _is_private_data(data):
        uncertified, shape = _certificate(trainer, module, strategy.plan, data)
        problems += uncertified
        if not (uncertified or wrong_module or wrong_data):
            unfit = output_problems(module.loss, shape, data)
            problems += unfit or rehearsal_problems(trainer, module, strategy.plan, data)
    return problems


def refuse(problems: Sequence[str]) -> None:
    """Raises one ValueError with all problems, if there are any."""
    if problems:
        texts = [with_hints_beside(problem) for problem in problems]
        problems = list(dict.fromkeys(line for text in texts for line in text.splitlines()))
        lines = "\n".join(f"  - {p}" for p in problems)
        raise ValueError(f"this set-up cannot be trained privately, {len(problems)} problem(s):\n{lines}")


def _none(*_: Any) -> list[str]:
    return []


def _plan(trainer: lightning.Trainer, strategy: Any) -> list[str]:
    plan = strategy.plan
    if plan is None:
        return [
            "the Strategy has no plan. HINT: use PrivateStrategy(plan=PrivacyPlan.create(...)), or a privacy group."
        ]
    problems = []
    if trainer.max_steps is None or trainer.max_steps < 0:
        problems.append(
            f"max_steps is {trainer.max_steps}; the guarantee covers {plan.steps} steps and no more. "
            f"HINT: use Trainer(max_steps={plan.steps}, max_epochs=-1)."
        )
    elif trainer.max_steps > plan.steps:
        problems.append(
            f"max_steps={trainer.max_steps} is more than the {plan.steps} steps that the budget allows. "
            "HINT: plan more steps (privacy.epochs or privacy.steps), and the noise is calibrated to them."
        )
    if strategy.noise_mode not in get_args(Mode):
        problems.append(f"noise_mode={strategy.noise_mode!r} is unknown. HINT: use one of {', '.join(get_args(Mode))}.")
    if strategy.noise_mode == "sharded" and trainer.gradient_clip_val:
        problems.append(
            "gradient_clip_val with noise_mode 'sharded' would clip by the norm of one process's share of the release, "
            "and processes would step by other factors. HINT: leave it out, or noise_mode='distributed'."
        )
    if strategy.fixed_secret is not None and len(strategy.fixed_secret) != 16:
        problems.append("fixed_secret is not 16 bytes. HINT: leave it out; it is an option for tests.")
    every = strategy.checksum_every_n_steps
    if every is not None and not (isinstance(every, int) and every >= 1):
        problems.append(f"checksum_every_n_steps={every!r} is not a number of steps. HINT: use 100, or null.")
    if plan.scaling == "batch_max" and strategy.world_size > 1:
        problems.append(
            f"scaling 'batch_max' divides by what one process sees of the batch, and {strategy.world_size} processes "
            "would end with different weights. HINT: use one process, or a certified scaling."
        )
    size = strategy.physical_batch_size
    if size is not None and not (isinstance(size, int) and size >= 1):
        problems.append(
            f"physical_batch_size={size!r} is not a number of examples. HINT: use 256, or null for one micro-batch."
        )
    elif trainer.accumulate_grad_batches not in (1, strategy.chunks):
        problems.append(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} disagrees with the sampler, which cuts a step "
            f"into {strategy.chunks} micro-batches: steps would be cut apart or glued together. "
            "HINT: leave it out and set privacy.physical_batch_size."
        )
    return problems


def _trainer(trainer: lightning.Trainer, strategy: Any) -> list[str]:
    problems = task_problems(trainer.num_devices, trainer.num_nodes)
    precision = str(trainer.precision)
    if getattr(trainer.precision_plugin, "scaler", None) is not None or precision.startswith("16"):
        problems.append(
            f"precision={precision!r} scales the loss by a factor that follows the data. "
            "HINT: use 'bf16-mixed' or '32-true'."
        )
    elif precision not in PRECISIONS:
        problems.append(
            f"precision={precision!r} keeps gradients in fewer bits than the bound on their sum needs. "
            f"HINT: use one of {', '.join(PRECISIONS)}."
        )
    if trainer._accelerator_connector.use_distributed_sampler:  # Lightning has no public name for this option
        problems.append(
            "use_distributed_sampler=True would rebuild the Poisson sampler around shuffled shards, which the "
            "accountant does not describe. HINT: use Trainer(use_distributed_sampler=False)."
        )
    if getattr(trainer, "fast_dev_run", False):
        problems.append("fast_dev_run cuts the run short in its own way. HINT: use trainer.max_steps=2.")
    elif trainer.limit_train_batches not in (1.0, None):
        problems.append(
            f"limit_train_batches={trainer.limit_train_batches} cuts logical steps apart. "
            "HINT: plan fewer steps instead."
        )
    overfit: Any = getattr(trainer, "overfit_batches", 0)
    if overfit:
        problems.append(f"overfit_batches={overfit} repeats a sample. HINT: use a small public data set.")
    if trainer._detect_anomaly:  # Lightning has no public name for this option
        problems.append(
            "detect_anomaly=True ends the run when an example's gradient is not finite, which tells that the example "
            "is there. HINT: leave it out; rows that are not finite are zeroed."
        )
    every = trainer.check_val_every_n_epoch
    if every is not None and every < 1:
        problems.append(
            f"check_val_every_n_epoch={every} is not positive. HINT: set limit_val_batches=0 for no validation."
        )
    if strategy.plan is not None and isinstance(trainer.val_check_interval, int) and every is not None:
        batches = steps_per_epoch(strategy.plan) * strategy.chunks
        if trainer.val_check_interval > batches:
            problems.append(
                f"val_check_interval={trainer.val_check_interval} is more than the {batches} batches of an epoch. "
                "HINT: set check_val_every_n_epoch=null to count across epochs."
            )
    if trainer.strategy is not strategy:
        problems.append(_other_strategy(trainer.strategy))
    return problems


def _other_strategy(given: Any) -> str:
    name = given if isinstance(given, str) else type(given).__name__
    return (
        f"strategy {name} cannot hold the private step: it would reduce or split gradients before noise is added "
        "(docs/distributed.md says what sharding needs). HINT: leave it out, or use "
        "lipdp_lightning.training.PrivateStrategy; privacy.noise_mode 'sharded' shards the optimizer's state."
    )


def refuse_strategy(given: Any) -> ValueError:
    """Returns the error for a strategy that is not the private one."""
    return ValueError(_other_strategy(given))


def _loggers(trainer: lightning.Trainer) -> list[str]:
    return [
        f"{type(logger).__name__}(log_model={vars(logger)['_log_model']!r}) uploads checkpoints, and those to resume "
        "from hold the run's secret. HINT: set log_model=False, and publish the result of `lipdp export`."
        for logger in trainer.loggers
        if vars(logger).get("_log_model")  # W&B offers no public name for this setting
    ]


_REFUSED_CALLBACKS: dict[type, str] = {
    LearningRateFinder: "searches on the private data with steps that no ledger counts. HINT: set the learning rate.",
    BatchSizeFinder: "runs steps that no ledger counts. HINT: set privacy.physical_batch_size.",
    ThroughputMonitor: "logs the sizes of training batches, which are private. HINT: lipdp status shows the rate.",
    SpikeDetection: "decides by the loss of training batches, which is private. HINT: leave it out.",
    GradientAccumulationScheduler: "changes how many micro-batches make a step. HINT: set privacy.physical_batch_size.",
}


def _callbacks(trainer: lightning.Trainer, module: Any) -> list[str]:
    problems = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        problems += [f"callback {name} {why}" for kind, why in _REFUSED_CALLBACKS.items() if isinstance(callback, kind)]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and type(module) is PrivateModule and not monitor.startswith(_MONITORED):
            problems.append(
                f"callback {name} monitors {monitor!r}, which nothing logs; on training data it would not be private. "
                "HINT: use 'validation/loss', and 'validation/accuracy' or 'validation/mae'."
            )
    return problems


def _is_private_data(data: Any) -> bool:
    needed = ("bind", "rows", "fingerprint", "dataset_size", "input_shape")
    return data is not None and all(hasattr(type(data), name) or name in vars(data) for name in needed)


def _data(data: Any, module: Any, plan: PrivacyPlan | None) -> list[str]:
    if not _is_private_data(data):
        return [
            "training data must come from a PrivateDataModule, which the plan's Poisson sampler can drive; a loader of "
            "shuffled batches is not what the accountant assumes. HINT: derive from data_modules.PrivateDataModule, in "
            "under 40 lines."
        ]
    try:
        data.setup("fit")
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    problems = [] if getattr(data, "preliminary", ()) else transfer_problems(data, DATA_METHODS)
    if not defined_here(data, "train_dataloader"):
        problems.append(
            f"{type(data).__name__}.train_dataloader is its own, and its batches would not be those of the plan's "
            "Poisson sampler. HINT: leave it out; load_train() gives the rows, and the sampler draws among them."
        )
    if plan is None:
        return problems
    bound = getattr(module, "input_bound", None)
    if plan.input_bound is not None and plan.input_bound != bound:
        problems.append(f"the plan's input_bound is {plan.input_bound}, the module's {bound}. HINT: use one.")
    if data.dataset_size != plan.dataset_size:
        problems.append(
            f"the plan was made for N = {plan.dataset_size} and the data module declares {data.dataset_size}. "
            "HINT: make the plan from the data module's dataset_size."
        )
    unit, rows = getattr(data, "unit", "example"), getattr(data, "max_examples_per_unit", 1)
    if unit != "example" and (plan.unit, plan.max_examples_per_unit) != (unit, rows):
        problems.append(
            f"the plan protects one {plan.unit} of at most {plan.max_examples_per_unit} rows, and the data module "
            f"declares one {unit} of at most {rows}: the epsilon would be for another unit. "
            f"HINT: use unit='{unit}', max_examples_per_unit={rows}."
        )
    if plan.preliminary and getattr(data, "samples_groups", False):
        problems.append(
            "the data module draws groups, and a statistic sums all rows of a group: its noise covers one row of each. "
            "HINT: use no private statistics, or a grouping that draws rows."
        )
    declared = tuple(getattr(data, "preliminary", ()))
    if declared != plan.preliminary:
        problems.append(
            f"the data module releases the statistics {list(declared)} before the first step, and the plan accounts "
            f"for {list(plan.preliminary)}. HINT: use PrivacyPlan.create(preliminary=data.preliminary, ...)."
        )
    return problems


def _shares(trainer: lightning.Trainer, data: Any) -> list[str]:
    """Refuses shares of held-out rows below one batch; Lightning's own message would state the number of batches."""
    problems = []
    for name, loader in (("limit_val_batches", "val_dataloader"), ("limit_test_batches", "test_dataloader")):
        share = getattr(trainer, name, None)
        if not (isinstance(share, float) and 0 < share < 1 and hasattr(data, loader)):
            continue
        try:
            batches = getattr(data, loader)()
        except ValueError:  # there are no held-out rows
            continue
        if batches and int(len(batches) * share) < 1:
            problems.append(
                f"{name}={share} is less than one batch of the held-out rows. "
                f"HINT: use {name}=1.0, or a smaller data.init_args.eval_batch_size."
            )
    return problems


def _certificate(
    trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any
) -> tuple[list[str], tuple[int, ...]]:
    """Returns the problems of making a mechanism, which is not used, and the shape of the model's output."""
    if not any(parameter.requires_grad for parameter in module.network.parameters()):
        return ["no layer of the network is trained, so that nothing can be learnt. HINT: requires_grad_(True)."], ()
    if plan.clips_examples:
        from ..clipping.samplers import clipping_problems

        if problems := clipping_problems(module.network, data.input_shape, plan, str(trainer.precision)):
            return problems, ()
    try:
        certifier = make_certifier(trainer, module, plan, data, Follower())
        Mechanism(module.network, certifier, plan, new_secret()).close()
    except CertificationError as error:
        return [str(problem) for problem in error.problems], ()
    except ValueError as error:
        return [str(error)], ()
    return _room_problems(trainer, module, plan, data), certifier.output_shape


class _GrownNorms(NormSource):
    """Gives every operator a multiple of its present norm, so that a certificate is that of weights that have grown."""

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        return GROWTH * operator.norm(weight, name)


def _room_problems(trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any) -> list[str]:
    """Returns why a certificate that nothing keeps small would soon overflow, and end the run at that step.

    Exact norms of examples need no small layers. They need that no value of a pass leaves float32's range, since one
    example with an infinite gradient would be seen in the sum, and the certificate is the proof of that.
    """
    if plan.scaling not in ("exact", "exact_layerwise") or plan.constraint.balls is not None:
        return []
    try:
        make_certifier(trainer, module, plan, data, _GrownNorms()).certify()
    except CertificationError:
        from .automatic_scaling import largest_norm

        return [
            f"scaling {plan.scaling!r} with max_norm null lets the norms of layers grow freely, and when each is "
            f"{GROWTH:g} times its present one, the certificate of this network overflows: the run would end midway. "
            f"HINT: set max_norm={largest_norm(plan, module, data):g}."
        ]
    return []
