"""Every reason to refuse a training set-up, found before the first step and reported at once."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder

from ..bounds.certifier import CertificationError, Certifier
from ..bounds.losses import Loss
from ..bounds.tracked import TrackedNorms
from ..bounds.values import NormSource
from ..mechanism.mechanism import Mechanism
from ..privacy.plan import PrivacyPlan
from ..privacy.randomness import new_secret
from ..slurm.environment import task_problems
from .module import PrivateModule

PRECISIONS = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.bfloat16}
_MONITORED = ("validation/", "epsilon", "nonprivate/")
FIXED_METHODS = ("forward", "training_step", "optimizer_step", "backward", "manual_backward")


def steps_per_epoch(plan: PrivacyPlan) -> int:
    """Steps after which each example has been drawn once on average."""
    return max(1, round(1 / plan.sample_rate))


def matching_modules(network: torch.nn.Module, patterns: tuple[tuple[str, float], ...]) -> dict[str, float]:
    """Module path -> radius for every leaf module that a pattern names; a pattern must name one."""
    leaves = [path for path, m in network.named_modules() if path and not list(m.children())]
    found: dict[str, float] = {}
    for pattern, radius in patterns:
        names = [path for path in leaves if fnmatchcase(path, pattern)]
        if not names:
            raise ValueError(f"cotangent_clip {pattern!r} matches no module. HINT: the modules are {', '.join(leaves)}.")
        for path in names:
            found.setdefault(path, radius)
    return found


def make_certifier(
    trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any, norms: NormSource | None = None
) -> Certifier:
    """The certifier of a module under a plan: its clipped loss, its cotangent clips, the trainer's precision."""
    return Certifier(
        module.network, data.input_shape, module.input_bound, module.private_loss(plan.loss_clip),
        norms=norms, compute_dtype=PRECISIONS.get(str(trainer.precision), torch.float32),
        cotangent_caps=matching_modules(module.network, plan.cotangent_clip),
    )  # fmt: skip


def check_set_up(trainer: lightning.Trainer, module: Any, strategy: Any, data: Any) -> None:
    """Raise one ValueError that lists all that is wrong, each with its HINT."""
    problems = [*_plan(trainer, strategy), *_trainer(trainer, strategy), *_loggers(trainer), *_callbacks(trainer, module)]
    problems += [*_module(module), *_data(data, module, strategy.plan)]
    if isinstance(module, PrivateModule) and strategy.plan is not None and _is_private_data(data):
        problems += _certificate(trainer, module, strategy.plan, data)
    if problems:
        problems = list(dict.fromkeys(problems))
        lines = "\n".join(f"  - {p}" for p in problems)
        raise ValueError(f"this set-up cannot be trained privately, {len(problems)} problem(s):\n{lines}")


def _plan(trainer: lightning.Trainer, strategy: Any) -> list[str]:
    plan = strategy.plan
    if plan is None:
        return ["the Strategy has no plan. HINT: PrivateStrategy(plan=PrivacyPlan.create(...)), or a privacy group."]
    problems = []
    if trainer.max_steps is None or trainer.max_steps < 0:
        problems.append(
            f"max_steps is {trainer.max_steps}; the guarantee covers {plan.steps} steps and no more. "
            f"HINT: Trainer(max_steps={plan.steps}, max_epochs=-1)."
        )
    elif trainer.max_steps > plan.steps:
        problems.append(
            f"max_steps={trainer.max_steps} is more than the {plan.steps} steps that the budget allows. "
            "HINT: plan more steps (privacy.epochs or privacy.steps), and the noise is calibrated to them."
        )
    if strategy.noise_mode not in ("distributed", "replicated"):
        problems.append(f"noise_mode={strategy.noise_mode!r} is unknown. HINT: 'distributed' or 'replicated'.")
    if strategy.fixed_secret is not None and len(strategy.fixed_secret) != 16:
        problems.append("fixed_secret is not 16 bytes. HINT: leave it out; it is an option for tests.")
    every = strategy.checksum_every_n_steps
    if every is not None and not (isinstance(every, int) and every >= 1):
        problems.append(f"checksum_every_n_steps={every!r} is no number of steps. HINT: 100, or null.")
    if plan.scaling == "batch_max" and strategy.world_size > 1:
        problems.append(
            f"scaling 'batch_max' divides by what one process sees of the batch, and {strategy.world_size} processes "
            "would end with different weights. HINT: one process, or a certified scaling."
        )
    size = strategy.physical_batch_size
    if size is not None and not (isinstance(size, int) and size >= 1):
        problems.append(f"physical_batch_size={size!r} is no number of examples. HINT: 256, or null for one micro-batch.")
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
            f"precision={precision!r} scales the loss by a factor that follows the data. HINT: 'bf16-mixed' or '32-true'."
        )
    elif precision not in PRECISIONS:
        problems.append(
            f"precision={precision!r} keeps gradients in fewer bits than the bound on their sum needs. "
            f"HINT: one of {', '.join(PRECISIONS)}."
        )
    if trainer._accelerator_connector.use_distributed_sampler:
        problems.append(
            "use_distributed_sampler=True would rebuild the Poisson sampler around shuffled shards, which the "
            "accountant does not describe. HINT: Trainer(use_distributed_sampler=False)."
        )
    if getattr(trainer, "fast_dev_run", False):
        problems.append("fast_dev_run cuts the run short in its own way. HINT: trainer.max_steps=2.")
    elif trainer.limit_train_batches not in (1.0, None):
        problems.append(
            f"limit_train_batches={trainer.limit_train_batches} cuts logical steps apart. HINT: plan fewer steps instead."
        )
    if trainer.overfit_batches:
        problems.append(f"overfit_batches={trainer.overfit_batches} repeats a sample. HINT: use a small public data set.")
    if trainer._detect_anomaly:
        problems.append(
            "detect_anomaly=True ends the run when an example's gradient is not finite, which tells that the example "
            "is there. HINT: leave it out; rows that are not finite are zeroed."
        )
    every = trainer.check_val_every_n_epoch
    if every is not None and every < 1:
        problems.append(f"check_val_every_n_epoch={every}. HINT: limit_val_batches=0 turns validation off.")
    if strategy.plan is not None and isinstance(trainer.val_check_interval, int) and every is not None:
        batches = steps_per_epoch(strategy.plan) * strategy.chunks
        if trainer.val_check_interval > batches:
            problems.append(
                f"val_check_interval={trainer.val_check_interval} is more than the {batches} batches of an epoch. "
                "HINT: check_val_every_n_epoch=null counts across epochs."
            )
    if trainer.strategy is not strategy:
        problems.append(_other_strategy(trainer.strategy))
    return problems


def _other_strategy(given: Any) -> str:
    name = given if isinstance(given, str) else type(given).__name__
    return (
        f"strategy {name} cannot hold the private step: it would reduce or split gradients before noise is added "
        "(sharding needs per-shard sums that meet noise before they leave a process). "
        "HINT: leave it out, or use lipdp_lightning.training.PrivateStrategy."
    )


def refuse_strategy(given: Any) -> ValueError:
    """The error for a strategy that is not the private one."""
    return ValueError(_other_strategy(given))


def _loggers(trainer: lightning.Trainer) -> list[str]:
    return [
        f"{type(logger).__name__}(log_model={logger._log_model!r}) uploads checkpoints, and those to resume from hold "
        "the run's secret. HINT: log_model=False, and publish the result of `lipdp export`."
        for logger in trainer.loggers
        if vars(logger).get("_log_model")
    ]


_REFUSED_CALLBACKS: dict[type, str] = {
    LearningRateFinder: "searches on the private data with steps that no ledger counts. HINT: set the learning rate.",
    BatchSizeFinder: "runs steps that no ledger counts. HINT: set privacy.physical_batch_size.",
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
                "HINT: 'validation/loss', and 'validation/accuracy' or 'validation/mae'."
            )
    return problems


def _module(module: Any) -> list[str]:
    if not isinstance(module, PrivateModule):
        return [f"the module is a {type(module).__name__}. HINT: put the network into PrivateModule(network, loss=...)."]
    problems = [
        f"{type(module).__name__}.{name} replaces PrivateModule's, on which the certificate and the noise rest. "
        "HINT: put the computation into the network, or a subclass of lipdp_lightning.bounds.losses.Loss."
        for name in FIXED_METHODS
        if getattr(type(module), name) is not getattr(PrivateModule, name)
    ]
    if not isinstance(module.loss, Loss):
        problems.append(
            f"the loss is a {type(module.loss).__name__}. HINT: pass it to PrivateModule(network, loss=...), which "
            "checks that it is a sum over examples."
        )
    if not module.automatic_optimization:
        problems.append("manual optimization bypasses the step that adds noise. HINT: automatic_optimization = True.")
    return problems + _optimizer_problems(module) + hooked(module)


def _optimizer_problems(module: PrivateModule) -> list[str]:
    try:
        optimizers = optimizers_of(module)
    except (ValueError, TypeError) as error:
        return [f"configure_optimizers fails: {error}. HINT: check the optimizer's options."]
    if len(optimizers) != 1:
        return [f"{len(optimizers)} optimizers are configured. HINT: return one."]
    problems = []
    optimizer = optimizers[0]
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates the gradient several times in a step. HINT: SGD, Adam, AdamW or RMSprop.")
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    missing = [n for n, p in module.network.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        problems.append(
            f"the optimizer does not hold {', '.join(missing)}, which would spend budget without training. "
            "HINT: pass all trained parameters, or freeze these with requires_grad_(False)."
        )
    own = {id(p) for p in module.network.parameters()}
    outside = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own]
    foreign = len(held - {id(p) for p in module.parameters()})
    if outside or foreign:
        names = [*outside, *([f"{foreign} tensors of other modules"] if foreign else [])]
        problems.append(
            f"no bound covers {', '.join(names)}: outside the network no noise would be added. "
            "HINT: move them into the network, or freeze them with requires_grad_(False)."
        )
    return problems


def optimizers_of(module: PrivateModule) -> list[torch.optim.Optimizer]:
    """What configure_optimizers returns, in any of the forms that Lightning knows."""
    made = module.configure_optimizers()
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, dict):
        return [made["optimizer"]]
    if isinstance(made, tuple | list):
        first = made[0] if made and isinstance(made[0], tuple | list) else made
        return [o["optimizer"] if isinstance(o, dict) else o for o in first]
    return []


def hooked(module: torch.nn.Module) -> list[str]:
    """Hooks that would be called with gradients or cotangents before noise is in them."""
    names = [
        name
        for name, p in module.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    names += [
        path or type(module).__name__
        for path, m in module.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    ]
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [
        f"a backward hook is attached to {shown}; it would see gradients before noise is added, as "
        "WandbLogger.watch(log='gradients') does. HINT: remove it; callbacks.GradientNoiseMonitor logs private "
        "gradient norms, and on_before_optimizer_step sees private gradients."
    ]


def _is_private_data(data: Any) -> bool:
    needed = ("bind", "rows", "fingerprint", "dataset_size", "input_shape")
    return data is not None and all(hasattr(type(data), name) or name in vars(data) for name in needed)


def _data(data: Any, module: Any, plan: PrivacyPlan | None) -> list[str]:
    if not _is_private_data(data):
        return [
            "training data must come from a PrivateDataModule, which the plan's Poisson sampler can drive; a loader of "
            "shuffled batches is not what the accountant assumes. HINT: data_modules.PrivateDataModule, under 40 lines."
        ]
    try:
        data.setup("fit")
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    if plan is None:
        return []
    problems = []
    bound = getattr(module, "input_bound", None)
    if plan.input_bound is not None and plan.input_bound != bound:
        problems.append(f"the plan's input_bound is {plan.input_bound}, the module's {bound}. HINT: use one.")
    if data.dataset_size != plan.dataset_size:
        problems.append(
            f"the plan was made for N = {plan.dataset_size} and the data module declares {data.dataset_size}. "
            "HINT: make the plan from the data module's dataset_size."
        )
    return problems


def _certificate(trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any) -> list[str]:
    """What stands between the model and its noise: a mechanism is made, and not used."""
    try:
        certifier = make_certifier(trainer, module, plan, data, TrackedNorms())
        Mechanism(module.network, certifier, plan, new_secret()).close()
    except CertificationError as error:
        return [str(problem) for problem in error.problems]
    except ValueError as error:
        return [str(error)]
    return []


class LiveChecks:
    """What set-up has checked and a callback could change later; looked at before every step."""

    def __init__(self, module: PrivateModule) -> None:
        self._module = module
        self._trained = self._flags()

    def _flags(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self._module.parameters())

    def check(self) -> None:
        """Raise if a parameter was unfrozen or added, or a backward hook attached, since set-up."""
        if self._flags() != self._trained:
            raise ValueError(
                "a parameter was frozen, unfrozen or added after set-up, so the certificate does not cover it. "
                "HINT: decide what is trained before the run, with requires_grad_."
            )
        problems = hooked(self._module)
        if problems:
            raise ValueError(problems[0])
