"""A project and a plain loop take the steps of PrivateStrategy: bit for bit without noise, and with its noise."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping
from projects import WITHOUT_FILES
from small_projects import Project, all_weights, fit, held_out, loader, privatize, rows
from small_runs import SECRET, Crash, make_module, make_network, make_plan
from small_runs import fit as fit_directly
from torch import Tensor, nn

import lipdp_lightning
from lipdp_lightning.adoption import private_trainer
from lipdp_lightning.adoption.adopted_module import AdoptedModule
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule, PrivateStrategy

BOUND = 3.0
PLANS: dict[str, dict[str, Any]] = {
    "exact": {"scaling": "exact", "radius": 0.5, "max_norm": None},
    "joint": {"scaling": "joint", "max_norm": 1.0},
    "layerwise": {"scaling": "layerwise", "allocation": "equal", "max_norm": 1.0},
}


def directly(plan: PrivacyPlan, **options: Any) -> Tensor:
    module = make_module(input_bound=BOUND)
    fit_directly(plan, module=module, **options)
    return all_weights(module)


def as_a_project(plan: PrivacyPlan, **options: Any) -> Tensor:
    private = privatize(plan=plan, input_bound=BOUND)
    fit(private, **options)
    return all_weights(private.module)


def in_a_loop(plan: PrivacyPlan, **options: Any) -> Tensor:
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = lipdp_lightning.Engine(
            network, plan, rows(), loss="cross_entropy", input_bound=BOUND, fixed_secret=SECRET, **options
        )
    with engine:
        for _ in engine:
            optimizer.step()
    return all_weights(network)


ENTRANCES: dict[str, Callable[..., Tensor]] = {"a project": as_a_project, "a loop": in_a_loop}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", PLANS)
def test_without_noise_every_entrance_takes_the_same_steps(entrance: str, name: str) -> None:
    plan = make_plan(**PLANS[name], noise_multiplier=0.0)
    assert torch.equal(ENTRANCES[entrance](plan), directly(plan))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_noise_has_the_size_of_the_plan(entrance: str) -> None:
    """The weights of one step differ by the noise alone, whose size is that of the mechanism's deviations."""
    quiet, loud = (
        make_plan(scaling="exact", radius=0.5, max_norm=None, steps=1, noise_multiplier=s) for s in (0.0, 4.0)
    )
    moved = ENTRANCES[entrance](loud) - ENTRANCES[entrance](quiet)
    expected = 0.1 * 4.0 / 20  # learning rate times deviation over batch; the radius of exact scaling is 1
    assert 0.7 * expected < float(moved.std()) < 1.6 * expected
    still = ENTRANCES[entrance](quiet) - directly(quiet)
    assert not 0.7 * expected < float(still.std()) < 1.6 * expected, "the check would not notice missing noise"


def test_micro_batches_change_the_order_of_a_sum_alone() -> None:
    plan = make_plan(**PLANS["exact"], noise_multiplier=0.0)
    torch.testing.assert_close(in_a_loop(plan, physical_batch_size=5), in_a_loop(plan), rtol=0, atol=1e-6)


# ---- what sees private rows


class SeenRows(Project):
    """A project that keeps every batch that its steps and hooks are given."""

    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(x)
        loss: Tensor = F.cross_entropy(self(x), y)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0])


def private_rows_in(seen: list[Tensor]) -> int:
    known = {tuple(row.tolist()) for row in rows()[0]}
    return sum(tuple(row.tolist()) in known for batch in seen for row in batch)


class RunsTheStep(Callback):
    """Does what the library must not do: it hands private rows to the project's own step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.project.training_step(batch[:2], batch_idx)


def test_no_private_row_reaches_the_projects_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    private = privatize(SeenRows())
    fit(private, held_out=held_out())
    seen = private.module.project.seen  # type: ignore[attr-defined]
    assert seen and private_rows_in(seen) == 0
    leaking = privatize(SeenRows())
    with pytest.raises(ValueError, match=r"training batch is private"):
        fit(leaking, RunsTheStep())
    monkeypatch.setattr(private_trainer, "ProjectStrategy", PrivateStrategy)
    fit(leaking, RunsTheStep())
    assert private_rows_in(leaking.module.project.seen) > 0, "the check would not notice"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    ["on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_batch_transfer", "backward",
     "optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device", "clip_gradients", "configure_model"],
)  # fmt: skip
def test_hooks_that_would_see_private_rows_are_refused(name: str) -> None:
    kind = type("Hooked", (Project,), {name: lambda self, *_, **__: None})
    with pytest.raises(ValueError, match=rf"Hooked\.{name} would see private rows.*HINT"):
        privatize(kind())


class LogsTheLoss(Callback):
    def __init__(self, name: str, form: Callable[[Tensor], Any] = Tensor.detach) -> None:
        self.name, self.form = name, form

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log(self.name, self.form(outputs["loss"]))


def test_the_training_loss_is_logged_under_a_name_that_says_so_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'loss' is logged in on_train_batch_end.*HINT"):
        fit(privatize(), LogsTheLoss("loss"))
    with pytest.raises(ValueError, match=r"training loss is private.*HINT"):
        fit(privatize(), LogsTheLoss("loss", float))
    trainer = fit(privatize(log_nonprivate=True))
    assert "nonprivate/loss" in trainer.callback_metrics and "train_loss" not in trainer.callback_metrics
    monkeypatch.setattr(private_trainer, "ProjectStrategy", PrivateStrategy)
    for form in (Tensor.detach, float):
        with pytest.raises(ValueError, match=r"'loss' is logged in on_train_batch_end.*HINT"):
            fit(privatize(), LogsTheLoss("loss", form))
    monkeypatch.setattr(AdoptedModule, "log", PrivateModule.log)
    assert "loss" in fit(privatize(), LogsTheLoss("loss")).callback_metrics, "without the check it is released"


def test_hooks_see_no_gradient_without_noise() -> None:
    class Watching(Project):
        found: list[Tensor]

        def __init__(self) -> None:
            super().__init__()
            self.found = []

        def on_after_backward(self) -> None:
            self.found.append(self.net[0].weight.grad.clone())  # type: ignore[index]

    def found(noise: float) -> Tensor:
        plan = make_plan(scaling="exact", radius=1.0, max_norm=None, noise_multiplier=noise, steps=1)
        private = privatize(Watching(), plan=plan)
        fit(private)
        (gradient,) = private.module.project.found  # type: ignore[attr-defined]
        return gradient

    assert float((found(100.0) - found(0.0)).std()) > 1.0


def test_backward_hooks_are_refused_or_left_behind() -> None:
    project, called = Project(), list[Any]()
    project.net[0].weight.register_hook(called.append)  # type: ignore[index]
    private = privatize(project)  # a copy of a parameter has none of its hooks
    fit(private)
    assert called == []
    private = privatize()
    private.module.network[0].weight.register_hook(called.append)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"backward hook is attached.*HINT"):
        fit(private)
    project.net.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"hook"):
        fit(privatize(project))


class Changes(Callback):
    """Changes a part of the step while it trains."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            self.change(pl_module)


CHANGES: dict[str, Callable[[Any], None]] = {
    "training_step": lambda m: setattr(m, "training_step", lambda batch, number: m.network(batch[0]).sum()),
    "loss": lambda m: setattr(m, "loss", type(m.loss)(temperature=0.1)),
    "network": lambda m: setattr(m, "network", make_network()),
    "layer": lambda m: m.network.add_module("1", nn.Identity()),
    "hook": lambda m: m.network[0].weight.register_hook(lambda g: None),
    "bound": lambda m: setattr(m.bounded_input, "bound", 1e6),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_is_changed_in_training_releases_nothing(name: str) -> None:
    private = privatize()
    with pytest.raises(ValueError, match=r"was changed after set-up"):
        fit(private, Changes(CHANGES[name]))


# ---- Trainer, schedules, callbacks


def test_monitors_of_what_nothing_logs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'train_loss'\) waits for a value of training rows.*monitor what.*val_loss"):
        fit(privatize(), EarlyStopping("train_loss"), held_out=held_out())
    with pytest.raises(ValueError, match=r"held-out rows, and none are declared.*HINT"):
        fit(privatize(), EarlyStopping("val_loss"))
    with pytest.raises(ValueError, match=r"waits for a value that nothing logs.*HINT: monitor val_loss"):
        fit(privatize(), EarlyStopping("val_los"), held_out=held_out())
    fit(privatize(), EarlyStopping("val_loss", patience=99), held_out=held_out())

    class Plateau(Project):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}

    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\(monitor='train_loss'\) waits for a value of training"):
        fit(privatize(Plateau()), held_out=held_out())


def test_a_schedule_that_is_too_short_is_refused_before_the_first_step() -> None:
    class Scheduled(Project):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with pytest.raises(ValueError, match=r"OneCycleLR ends after 9 steps, and the run takes 12.*set total_steps="):
        fit(privatize(Scheduled()))


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"precision": "16-mixed"}, "scales the loss by a factor that follows the data"),
        ({"strategy": "fsdp"}, "cannot hold the private step"),
        ({"max_epochs": 9}, "the noise is calibrated to 12"),
        ({"accumulate_grad_batches": 4}, "disagrees with the sampler"),
        ({"fast_dev_run": True}, "fast_dev_run cuts the run short"),
        ({"limit_train_batches": 2}, "cuts logical steps apart"),
        ({"detect_anomaly": True}, "detect_anomaly=True"),
        ({"use_distributed_sampler": True}, "rebuild the Poisson sampler"),
    ],
)
def test_options_of_the_trainer_that_break_the_step_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){reason}.*HINT"):
        fit(privatize(), **options)


def test_fewer_epochs_than_planned_are_taken_and_epochs_have_their_number() -> None:
    private = privatize()
    trainer = fit(private, max_epochs=2)
    assert (trainer.global_step, trainer.max_epochs, trainer.estimated_stepping_batches) == (6, 2, 6)
    assert trainer.strategy.branches.spent(6) == 6


def test_one_plan_is_spent_once_however_many_trainers_there_are() -> None:
    private = privatize()
    assert fit(private, max_epochs=3).global_step == 9
    with pytest.raises(ValueError, match=r"the Trainer|steps are spent|beyond|left"):
        for _ in range(3):  # three steps are left
            trainer = fit(private)
            assert trainer.global_step <= 3
    again = privatize()
    fit(again)
    with pytest.raises(ValueError, match=r"the plan's 12 steps are spent.*HINT"):
        fit(again)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_projects_are_compiled_in_place(whole: bool) -> None:
    project: Any = Project()
    if whole:
        project = torch.compile(project, backend="eager")
    else:
        project.net = torch.compile(project.net, backend="eager")
    private = privatize(project, plan=make_plan(**PLANS["exact"], noise_multiplier=0.0), input_bound=BOUND)
    assert private.module.network._compiled_call_impl is not None
    fit(private)
    plain = as_a_project(make_plan(**PLANS["exact"], noise_multiplier=0.0))
    torch.testing.assert_close(all_weights(private.module), plain, rtol=0, atol=1e-6)


def test_made_up_rows_leave_nothing_behind() -> None:
    class Counting(Project):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.seen.append(len(x))
            self.accuracy(self(x), y)
            return F.cross_entropy(self(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    project = privatize(Counting()).module.project
    assert project.seen == [] and project.accuracy._update_count == 0  # type: ignore[attr-defined,union-attr]


def test_what_was_not_made_private_is_refused() -> None:
    private = privatize()
    with pytest.raises(ValueError, match=r"(?s)the model is a Project as it was.*HINT.*the data is a DataLoader.*HINT"):
        private.Trainer(**WITHOUT_FILES).fit(Project(), loader())


def test_bf16_runs() -> None:
    assert fit(privatize(), precision="bf16-mixed").global_step == 12


def test_rows_of_a_private_data_module_are_taken_as_declared() -> None:
    from small_runs import Blobs

    private = privatize(data=Blobs(), size=None)
    trainer = fit(private, limit_val_batches=1.0)
    assert trainer.global_step == 12 and "val_loss" in trainer.callback_metrics


def test_declared_arrays_train_through_both_entrances() -> None:
    x, y = rows()
    declared = {"rows": 60, "shape": [6], "low": -2, "high": 2, "label": {"classes": 3}}
    data = lipdp_lightning.PrivateData.of((x.clamp(-2, 2).numpy(), y.numpy()), declared)
    plan = make_plan(scaling="exact", radius=1.0, max_norm=None, dataset_size=data.dataset_size)
    trainer = fit(privatize(data=data, size=None, plan=plan), limit_val_batches=1.0)
    assert trainer.global_step == 12 and "val_loss" in trainer.callback_metrics
    assert len(list(lipdp_lightning.Engine(make_network(), plan, data, loss="cross_entropy"))) == 12


def test_the_scaling_is_chosen_as_lipdp_fit_does_and_the_reason_is_told(tmp_path: Path) -> None:
    class Linear(Project):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

    budget = {"epsilon": 8.0, "delta": 1e-3, "steps": 12, "run_dir": tmp_path / "run"}
    private = privatize(**budget)
    assert private.plan.scaling == "exact" and private.plan.is_settled
    assert "the scaling is 'exact': 2 layers are trained, and bounds loosen with depth" in private.notes
    fit(private)
    report = json.loads((tmp_path / "run" / "privacy_report.json").read_text())
    assert any("2 layers are trained" in note for note in report["notes"])
    tight = privatize(Linear(), **budget | {"run_dir": None})
    assert tight.plan.scaling == "joint" and any("whose bound is tight" in note for note in tight.notes)
    stated = privatize(**budget | {"run_dir": None}, scaling="layerwise", allocation="equal")
    assert stated.plan.scaling == "layerwise" and not any("the scaling is" in note for note in stated.notes)
    budget |= {"run_dir": None}
    norms = [privatize(**budget, **given).plan.to_dict()["max_norm"] for given in (
        {}, {"scaling": "exact", "radius": 1.0}, {"scaling": "exact", "radius": 1.0, "max_norm": 1.0})]  # fmt: skip
    assert norms == [64.0, 64.0, 1.0]


# ---- run directories


def test_a_run_says_before_it_spends_that_no_metric_will_exist(tmp_path: Path, capsys: Any) -> None:
    for name, rows_out in (("without", None), ("with", held_out())):
        fit(privatize(run_dir=tmp_path / name), held_out=rows_out)
        assert ("no row is held out" in capsys.readouterr().out) == (rows_out is None)


def test_a_run_directory_is_continued_bit_for_bit_and_reported(tmp_path: Path) -> None:
    plan = make_plan(scaling="exact", radius=1.0, max_norm=None)

    def run(name: str, *callbacks: Callback) -> Tensor:
        private = privatize(plan=plan, run_dir=tmp_path / name)
        fit(private, *callbacks, held_out=held_out())
        return all_weights(private.module)

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("parts", Crash(7))
    assert torch.equal(run("parts"), whole)
    assert (tmp_path / "parts" / "report.html").exists() and (tmp_path / "parts" / "ledger.json").exists()
    facts = json.loads((tmp_path / "parts" / "privacy_report.json").read_text())
    assert facts["title"] == "Project, made private" and list(facts["metrics"]) == ["validation/val_loss"]
    with pytest.raises(ValueError, match=r"is finished.*HINT"):
        run("parts")


def test_a_run_that_another_version_began_with_another_choice_says_what_it_was(tmp_path: Path) -> None:
    class Linear(Project):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

    budget = {"epsilon": 8.0, "delta": 1e-3, "steps": 12}
    now = privatize(Linear(), **budget)
    before = PrivacyPlan.from_dict(now.plan.to_dict() | {"loss_clip": None})  # as `auto` was before it clipped
    with pytest.raises(InterruptedError):
        fit(privatize(Linear(), plan=before, run_dir=tmp_path / "run"), Crash(7))
    files = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    reason = rf"another privacy plan.*: loss_clip was null and is {now.plan.loss_clip}\. HINT.*plan.json"
    with pytest.raises(ValueError, match=reason):
        fit(privatize(Linear(), **budget, run_dir=tmp_path / "run"))
    assert files == {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    named = {"scaling": "joint", "max_norm": None, "input_bound": before.input_bound}
    assert fit(privatize(Linear(), **budget, **named, run_dir=tmp_path / "run")).global_step == 12


def test_a_checkpoint_is_that_of_the_projects_own_class(tmp_path: Path) -> None:
    private = privatize()
    trainer = fit(private)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt", weights_only=False)["lipdp"]["secret"] == SECRET
    assert "lipdp" not in torch.load(tmp_path / "weights.ckpt", weights_only=False)  # which may be published
    assert SECRET not in (tmp_path / "weights.ckpt").read_bytes()
    found = Project.load_from_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert torch.equal(all_weights(found), all_weights(private.module.project))
    assert isinstance(found, lightning.LightningModule) and type(found.net[0]) is nn.Linear  # type: ignore[index]


def test_callbacks_find_the_projects_attributes_under_their_names() -> None:
    class Named(Project):
        threshold = 3

        def __init__(self) -> None:
            super().__init__()
            self.history = [1]

    private = privatize(Named())
    module: Any = private.module
    module.history.append(2)
    assert module.project.history == [1, 2] and module.threshold == 3
    assert isinstance(module.net, nn.Module) and loader().batch_size == 20
