"""Every refusal is raised in set-up, with its HINT, before the first step and before any file is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from small_runs import SECRET, Blobs, fit, make_module, make_network, make_plan, make_strategy, make_trainer
from torch import nn

from lipdp_lightning.bounds.graph import CertificationError
from lipdp_lightning.training import PrivateModule, PrivateStrategy


class Watch(Callback):
    """Whether a step was begun."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps += 1


def refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any = None,
    data: Any = None,
    strategy: Any = None,
    callbacks: tuple[Callback, ...] = (),
    **trainer_options: Any,
) -> str:
    """The error of a set-up that must be refused; nothing was written and no step begun."""
    monkeypatch.chdir(tmp_path)
    watch = Watch()
    strategy = make_strategy(make_plan()) if strategy is None else strategy
    options = {"logger": CSVLogger(tmp_path / "logs"), "default_root_dir": tmp_path} | trainer_options
    trainer = make_trainer(strategy, watch, *callbacks, **options)
    with pytest.raises(ValueError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(make_module() if module is None else module, datamodule=Blobs() if data is None else data)
    assert watch.steps == 0
    assert list(tmp_path.iterdir()) == [], "a refused set-up has left something behind"
    return str(caught.value)


TRAINER_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "distributed sampler": ({"use_distributed_sampler": True}, "use_distributed_sampler=True"),
    "part of an epoch": ({"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
    "overfitting": ({"overfit_batches": 1}, "overfit_batches=1"),
    "accumulation": ({"accumulate_grad_batches": 3}, "accumulate_grad_batches=3 disagrees"),
    "too many steps": ({"max_steps": 13}, "max_steps=13 is more than the 12 steps"),
    "steps without end": ({"max_steps": -1, "max_epochs": 3}, "max_steps is -1"),
    "half precision": ({"precision": "16-true"}, "precision='16-true' scales the loss"),
    "half precision of weights": ({"precision": "bf16-true"}, "precision='bf16-true' keeps gradients in fewer bits"),
    "anomaly detection": ({"detect_anomaly": True}, "detect_anomaly=True ends the run"),
    "fast_dev_run": ({"fast_dev_run": True, "max_steps": 12}, "fast_dev_run"),
    "throughput": ({"callbacks_": (ThroughputMonitor(len),)}, "callback ThroughputMonitor"),
    "rate finder": ({"callbacks_": (LearningRateFinder(),)}, "callback LearningRateFinder"),
    "batch size finder": ({"callbacks_": (BatchSizeFinder(),)}, "callback BatchSizeFinder"),
    "accumulation schedule": ({"callbacks_": (GradientAccumulationScheduler({0: 2}),)}, "GradientAccumulationSch"),
    "monitor on training data": ({"callbacks_": (EarlyStopping("train_loss"),)}, "monitors 'train_loss'"),
    "validation every 0 epochs": ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0"),
    "validation after the epoch": ({"val_check_interval": 9}, "val_check_interval=9 is more than the 3 batches"),
}


@pytest.mark.parametrize("case", TRAINER_CASES)
def test_a_trainer_that_cannot_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    options, expected = TRAINER_CASES[case]
    options = dict(options)
    message = refusal(tmp_path, monkeypatch, callbacks=options.pop("callbacks_", ()), **options)
    assert expected in message and "HINT" in message and "1 problem(s)" in message


def test_a_loss_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    message = refusal(tmp_path, monkeypatch, plugins=[plugin])
    assert "precision='16-mixed' scales the loss" in message and "HINT: use 'bf16-mixed'" in message


class Manual(PrivateModule):
    @property
    def automatic_optimization(self) -> bool:
        return False


class OwnStep(PrivateModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / len(batch[0])


class OwnForward(PrivateModule):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(10 * x)


class TwoOptimizers(PrivateModule):
    def configure_optimizers(self) -> Any:
        first, second = self.network[0].parameters(), self.network[2].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]


class PartOfTheParameters(PrivateModule):
    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.network[0].parameters(), lr=0.1)}


class ParameterOutsideTheNetwork(PrivateModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(()))


class ForeignParameters(PrivateModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


class NegativeRate(PrivateModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=-1)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(list(parameters))


def mean_loss() -> PrivateModule:
    module = make_module()
    module.loss = nn.CrossEntropyLoss()
    return module


def hooked_parameter() -> PrivateModule:
    module = make_module()
    module.network[0].weight.register_hook(lambda gradient: None)
    return module


def hooked_accumulation() -> PrivateModule:
    module = make_module()
    module.network[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


def hooked_layer() -> PrivateModule:
    module = make_module()
    module.network[2].register_full_backward_hook(lambda *_: None)
    return module


MODULE_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "another module": (lambda: _Plain(), "the module is a _Plain"),
    "manual optimization": (lambda: make_module(kind=Manual), "manual optimization bypasses"),
    "training step": (lambda: make_module(kind=OwnStep), "OwnStep.training_step replaces PrivateModule's"),
    "forward": (lambda: make_module(kind=OwnForward), "OwnForward.forward replaces PrivateModule's"),
    "several optimizers": (lambda: make_module(kind=TwoOptimizers), "2 optimizers are configured"),
    "LBFGS": (lambda: make_module(optimizer=lbfgs), "LBFGS evaluates the gradient several times"),
    "parameter not held": (
        lambda: make_module(kind=PartOfTheParameters),
        "the optimizer does not hold 2.weight, 2.bias",
    ),
    "parameter elsewhere": (lambda: make_module(kind=ParameterOutsideTheNetwork), "no bound covers temperature"),
    "foreign parameters": (lambda: make_module(kind=ForeignParameters), "no bound covers 1 tensors of other modules"),
    "optimizer options": (lambda: make_module(kind=NegativeRate), "configure_optimizers fails: Invalid learning rate"),
    "mean loss": (mean_loss, "the loss is a CrossEntropyLoss"),
    "hook on a parameter": (hooked_parameter, "a backward hook is attached to network.0.weight"),
    "hook after accumulation": (hooked_accumulation, "a backward hook is attached to network.0.weight"),
    "hook on a layer": (hooked_layer, "a backward hook is attached to network.2"),
}


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("case", MODULE_CASES)
def test_a_module_that_cannot_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    build, expected = MODULE_CASES[case]
    message = refusal(tmp_path, monkeypatch, module=build())
    assert expected in message and "HINT" in message


class UnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_a_trained_parameter_without_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(tmp_path, monkeypatch, module=make_module(network=UnusedParameter()))
    assert "unused.weight: this trained parameter has no bound" in message and "HINT: freeze it" in message
    frozen = UnusedParameter()
    frozen.unused.requires_grad_(False)
    _, trainer = fit(make_plan(steps=2), module=make_module(network=frozen))
    assert trainer.global_step == 2


def test_modules_that_mix_examples_and_mean_losses_are_refused_when_the_module_is_made() -> None:
    mixing = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(CertificationError, match=r"1: .*batch normalisation mixes examples.*HINT"):
        PrivateModule(mixing)
    with pytest.raises(ValueError, match=r"reduction='mean'.*HINT"):
        PrivateModule(make_network(), loss=nn.CrossEntropyLoss())


def test_tied_weights_work_with_the_sum_of_their_bounds() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))

    torch.manual_seed(0)
    _, trainer = fit(make_plan(steps=3, scaling="worst_case"), module=make_module(network=Tied()))
    mechanism = trainer.strategy.mechanism
    inner = mechanism.certificate.group("inner")
    assert trainer.global_step == 3 and len(inner.uses) == 2
    assert inner.worst_case == pytest.approx(sum(u.cotangent_bound * u.gradient_factor for u in inner.uses))


@pytest.mark.parametrize("kind", ["auto", "fsdp", "object"])
def test_other_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """PrivateModule itself refuses them, in its first hook."""
    from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

    if kind == "fsdp":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(Exception, match="FSDP"):  # Lightning's own refusal on a machine without accelerators
            make_trainer(FSDPStrategy())
        return
    strategy = "auto" if kind == "auto" else SingleDeviceStrategy("cpu")
    message = refusal(tmp_path, monkeypatch, strategy=strategy)
    assert "SingleDeviceStrategy, which would release raw gradients" in message and "HINT" in message


def test_plans_data_and_bounds_that_contradict_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": PrivateStrategy(None), "max_steps": 12}, "the Strategy has no plan"),
        ({"strategy": make_strategy(make_plan(dataset_size=70))}, "the plan was made for N = 70 and the data module"),
        ({"strategy": make_strategy(make_plan(input_bound=2.0))}, "input_bound is 2.0, the module's 1.0"),
        ({"strategy": make_strategy(make_plan(cotangent_clip={"nope*": 1.0}))}, "'nope*' matches no module"),
        ({"strategy": make_strategy(make_plan(max_norm={"nope*": 1.0}))}, "'nope*' matches no layer"),
        ({"strategy": make_strategy(make_plan(), noise_mode="rank zero")}, "noise_mode='rank zero' is unknown"),
        ({"strategy": make_strategy(make_plan(), fixed_secret=b"short")}, "fixed_secret is not 16 bytes"),
        ({"strategy": make_strategy(make_plan(), physical_batch_size=0)}, "physical_batch_size=0"),
    ]
    for options, expected in cases:
        message = refusal(tmp_path, monkeypatch, **options)
        assert expected in message and "HINT" in message, expected


@pytest.mark.parametrize("scaling", ["exact", "exact_layerwise"])
def test_a_certificate_that_would_soon_overflow_when_nothing_limits_the_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str
) -> None:
    """At 60 layers of norm 1, a doubling of each is beyond what float32 holds; a projection keeps it away."""

    def deep() -> PrivateModule:
        layers = [nn.Linear(6, 6) for _ in range(60)]
        for layer in layers:
            nn.init.eye_(layer.weight)
        return make_module(network=nn.Sequential(*layers, nn.Linear(6, 3)))

    options: dict[str, Any] = {"scaling": scaling, "radius": 1.0, "steps": 2}
    text = refusal(tmp_path, monkeypatch, deep(), strategy=make_strategy(make_plan(max_norm=None, **options)))
    assert "the run would end midway" in text and "HINT: set max_norm=1." in text
    trainer, _ = fit(make_plan(max_norm=1.0, **options), module=deep())
    assert trainer.global_step == 2


def test_data_that_the_sampler_cannot_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import LightningDataModule

    class Shuffled(LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 6)), shuffle=True)

    class Missing(Blobs):
        def load_train(self) -> Any:
            raise FileNotFoundError("no file rows.csv. HINT: put it there.")

    class WrongShape(Blobs):
        input_shape = (7,)

    assert "must come from a PrivateDataModule" in refusal(tmp_path, monkeypatch, data=Shuffled())
    assert "no file rows.csv" in refusal(tmp_path, monkeypatch, data=Missing())
    assert "HINT" in refusal(tmp_path, monkeypatch, data=WrongShape())


def test_all_problems_come_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(
        tmp_path, monkeypatch, module=make_module(kind=PartOfTheParameters),
        strategy=make_strategy(make_plan(dataset_size=70)),
        use_distributed_sampler=True, overfit_batches=1,
    )  # fmt: skip
    for expected in ("use_distributed_sampler", "overfit_batches", "does not hold 2.weight", "N = 70"):
        assert expected in message
    assert message.count("HINT") >= 4 and message.count("\n  - ") >= 4


class AfterSetUp(Callback):
    """Does something to the module when set-up has passed."""

    def __init__(self, action: Callable[[Any], Any]) -> None:
        self.action = action

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.action(pl_module)


@pytest.mark.parametrize("what", ["hook", "unfreeze"])
def test_what_a_callback_changes_after_set_up_is_noticed_before_the_first_step(what: str) -> None:
    network = make_network()
    network[0].bias.requires_grad_(False)
    module = make_module(network=network)
    action = {
        "hook": lambda m: m.network[2].weight.register_hook(lambda gradient: None),
        "unfreeze": lambda m: m.network[0].bias.requires_grad_(True),
    }[what]
    with pytest.raises(ValueError, match=r"(backward hook|after set-up).*HINT"):
        fit(make_plan(steps=2), AfterSetUp(action), module=module)


def test_a_set_up_without_faults_passes_and_trains() -> None:
    """The control: what the cases above change is all that is wrong with them."""
    _, trainer = fit(make_plan(), trainer_options={"gradient_clip_val": 1.0}, physical_batch_size=10)
    assert trainer.global_step == 12 and trainer.strategy.fixed_secret == SECRET
