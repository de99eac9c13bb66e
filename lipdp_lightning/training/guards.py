"""Every reason to refuse a training set-up, found before the first step and reported at once."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import lightning
import torch

from ..privacy.plan import PrivacyPlan
from .module import PrivateModule


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


def check_set_up(trainer: lightning.Trainer, module: Any, strategy: Any) -> None:
    """Raise one ValueError that lists all that is wrong, each with its HINT."""
    problems = [*_plan(trainer, strategy), *_trainer(trainer), *_module(module), *_data(trainer, strategy)]
    if problems:
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
    return problems


def _trainer(trainer: lightning.Trainer) -> list[str]:
    problems = []
    precision = str(trainer.precision)
    if precision.startswith("16") or getattr(trainer.precision_plugin, "scaler", None) is not None:
        problems.append(
            f"precision={precision!r} scales the loss by a factor that follows the data. HINT: 'bf16-mixed' or '32-true'."
        )
    if trainer._accelerator_connector.use_distributed_sampler:
        problems.append(
            "use_distributed_sampler=True would rebuild the Poisson sampler around shuffled shards, which the "
            "accountant does not describe. HINT: Trainer(use_distributed_sampler=False)."
        )
    if trainer.limit_train_batches not in (1.0, None):
        problems.append(
            f"limit_train_batches={trainer.limit_train_batches} cuts logical steps apart. HINT: plan fewer steps instead."
        )
    if trainer.overfit_batches:
        problems.append(f"overfit_batches={trainer.overfit_batches} repeats a sample. HINT: use a small public data set.")
    return problems


def _module(module: Any) -> list[str]:
    if not isinstance(module, PrivateModule):
        return [f"the module is a {type(module).__name__}. HINT: put the network into PrivateModule(network, loss=...)."]
    problems = []
    if not module.automatic_optimization:
        problems.append("manual optimization bypasses the step that adds noise. HINT: automatic_optimization = True.")
    optimizers = _optimizers(module)
    if len(optimizers) != 1:
        problems.append(f"{len(optimizers)} optimizers are configured. HINT: return one.")
        return problems
    optimizer = optimizers[0]
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates the gradient several times in a step. HINT: SGD, Adam, AdamW or RMSprop.")
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        problems.append(
            f"the optimizer does not hold {', '.join(missing)}, which would spend budget without training. "
            "HINT: pass all trained parameters, or freeze these with requires_grad_(False)."
        )
    return problems


def _optimizers(module: PrivateModule) -> list[torch.optim.Optimizer]:
    configured = module.configure_optimizers()
    if isinstance(configured, torch.optim.Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return [configured["optimizer"]]
    if isinstance(configured, tuple | list):
        first = configured[0] if configured and isinstance(configured[0], tuple | list) else configured
        return [o["optimizer"] if isinstance(o, dict) else o for o in first]
    return []


def _data(trainer: lightning.Trainer, strategy: Any) -> list[str]:
    data = getattr(trainer, "datamodule", None)
    needed = ("bind", "rows", "fingerprint", "dataset_size", "input_shape")
    if data is None or not all(hasattr(type(data), name) or hasattr(data, name) for name in needed):
        return [
            "training data must come from a PrivateDataModule, which the plan's Poisson sampler can drive; a loader of "
            "shuffled batches is not what the accountant assumes. HINT: data_modules.PrivateDataModule, under 40 lines."
        ]
    plan = strategy.plan
    module = strategy.lightning_module
    if plan is not None and plan.input_bound is not None and plan.input_bound != getattr(module, "input_bound", None):
        return [f"the plan's input_bound is {plan.input_bound}, the module's {getattr(module, 'input_bound', None)}. HINT: use one."]
    if plan is not None and data.dataset_size != plan.dataset_size:
        return [
            f"the plan was made for N = {plan.dataset_size} and the data module declares {data.dataset_size}. "
            "HINT: make the plan from the data module's dataset_size."
        ]
    return []
