"""A project's LightningModule under the private step: its hooks stay, and its ``training_step`` is replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import lightning
from torch import nn

from ..bounds.losses import Loss
from ..training.module import PrivateModule

# hooks that are handed to the project; they see no private row, and gradients after noise alone
_HANDED_ON = (
    "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_gradient_clipping",
    "lr_scheduler_step", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_save_checkpoint",
    "on_load_checkpoint", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "setup", "teardown", "prepare_data", "val_dataloader", "test_dataloader",
    *(f"on_{stage}_{when}" for stage in ("validation", "test", "predict") for when in (
        "start", "end", "batch_start", "batch_end", "epoch_start", "epoch_end", "model_eval", "model_train")),
)  # fmt: skip
# hooks that would see private rows, or gradients without noise, or that replace a part of the step
_REFUSED = (
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_before_batch_transfer",
    "transfer_batch_to_device", "on_after_batch_transfer", "backward", "manual_backward", "optimizer_step",
    "optimizer_zero_grad", "clip_gradients", "toggle_optimizer", "untoggle_optimizer", "configure_model",
)  # fmt: skip
_STEPS = ("validation_step", "test_step", "predict_step")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "training_step")
_PUBLIC = ("epsilon", "privacy/", "nonprivate/")


def project_problems(project: Any) -> list[str]:
    """Returns every reason why a LightningModule cannot be put under the private step, before it is traced."""
    if not isinstance(project, lightning.LightningModule):
        return [
            f"the model is a {type(project).__name__}, and privatize() takes a LightningModule. HINT: for a network "
            "and a loop of your own, use lipdp_lightning.Engine(network, plan, data, loss=...)."
        ]
    if isinstance(project, PrivateModule):
        return ["the model is private already. HINT: train it with PrivateStrategy(plan), or give the original."]
    problems = [
        f"{type(project).__name__}.{name} would see private rows or gradients without noise, or replace a part of the "
        "private step. HINT: validation hooks, on_after_backward and on_before_optimizer_step stay; they see held-out "
        "rows and private gradients."
        for name in _REFUSED
        if _overrides(project, name)
    ]
    if not project.automatic_optimization:
        problems.append(
            "the module optimizes by hand, and its own backward passes would bypass the noise. HINT: return the loss "
            "from training_step with automatic_optimization = True, or use lipdp_lightning.Engine in a loop."
        )
    if not _overrides(project, "training_step"):
        problems.append(f"{type(project).__name__} has no training_step. HINT: return the loss of a batch from one.")
    return problems


def _overrides(project: Any, name: str) -> bool:
    found = getattr(project, name, None)
    return getattr(found, "__func__", found) is not getattr(lightning.LightningModule, name, None)


class AdoptedModule(PrivateModule):
    """A PrivateModule whose hooks, optimizers and held-out steps are those of a project.

    Guarantee: the project's ``training_step`` is not called in training, and none of its hooks is given a training
    batch, a training loss or a gradient without noise. The weights, the state_dict and the hyper-parameters are those
    of the project, so that its class loads a checkpoint as before.

    Args:
        project: The project's module.
        network: The network that is trained, made of the project's parts.
        loss: The certified loss of each example.
        input_bound: The largest norm of a row; longer rows are scaled down to it.
        log_nonprivate: Whether to log the training loss under ``nonprivate/``.

    Attributes:
        drops_ids: Whether held-out batches are (x, y, ids), of which the project's steps are given (x, y).
    """

    drops_ids = False
    project: lightning.LightningModule

    def __init__(
        self, project: lightning.LightningModule, network: nn.Module, loss: Loss, input_bound: float,
        log_nonprivate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(network, loss, input_bound, log_nonprivate=log_nonprivate)
        self.project = project
        vars(project).update(log=self.log, log_dict=self.log_dict)
        if project.hparams:
            self._set_hparams(dict(project.hparams))
            self._hparams_name, self._log_hyperparams = project._hparams_name, project._log_hyperparams
            self._hparams_initial = copy.deepcopy(self._hparams)

    def configure_callbacks(self) -> Any:
        """Returns the project's callbacks; refuses a Strategy that adds no noise."""
        return [*super().configure_callbacks(), *_listed(self.project.configure_callbacks())]

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the project's own state, with its own names."""
        return self.project.state_dict(*arguments, **keywords)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restores the project's own state."""
        return self.project.load_state_dict(state_dict, strict, assign)

    def log(self, name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        """Logs a value; what is computed in a hook around a training batch must be named as not private."""
        if self._current_fx_name in _BATCH_HOOKS and not name.startswith(_PUBLIC):
            raise ValueError(
                f"{name!r} is logged in {self._current_fx_name}, where a batch and its loss are private: its value may "
                "tell of them without noise. HINT: log it from validation or at the end of an epoch; "
                "privatize(log_nonprivate=True) logs the training loss as nonprivate/loss, and the report says so."
            )
        super().log(name, value, *arguments, **keywords)


def adopted(
    project: lightning.LightningModule, network: nn.Module, loss: Loss, input_bound: float, log_nonprivate: bool
) -> AdoptedModule:
    """Returns a module of a class that has the hooks and the names of the project's own class."""
    own: dict[str, Any] = {name: _handed_on(name) for name in _HANDED_ON if _overrides(project, name)}
    taken = {*dir(AdoptedModule), *vars(PrivateModule(nn.Linear(1, 1))), "project", "network", "bounded_input"}
    names = {*vars(project), *dir(type(project)), *(name for name, _ in project.named_children())}
    own |= {name: _of_project(name) for name in names - taken if not name.startswith("_")}
    kind = type(f"Private{type(project).__name__}", (AdoptedModule,), own | {"__module__": type(project).__module__})
    module: AdoptedModule = kind(project, network, loss, input_bound, log_nonprivate)
    return module


def _handed_on(name: str) -> Callable[..., Any]:
    def hook(self: AdoptedModule, *arguments: Any, **keywords: Any) -> Any:
        if name in _STEPS and self.drops_ids:
            arguments = (tuple(arguments[0])[:2], *arguments[1:])
        return getattr(self.project, name)(*arguments, **keywords)

    hook.__name__ = name
    return hook


def _of_project(name: str) -> property:
    """Returns a property by which callbacks find the project's attributes under their own names."""
    return property(lambda self: getattr(self.project, name), lambda self, value: setattr(self.project, name, value))


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]
