"""Averages of weights: what they are, that evaluations see them, and that training never notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_runs import BlobsWithValidation, fit, make_module, make_network, make_plan, make_trainer, weights
from torch import Tensor

from lipdp_lightning.bounds.certifier import certify
from lipdp_lightning.callbacks import ParameterAveraging, PrivacyReport, ResumeCheckpoint
from lipdp_lightning.training.averaging import WeightAverage, evaluated_state

STEPS = 12
EVALUATED = {"limit_val_batches": 1.0, "val_check_interval": 2, "check_val_every_n_epoch": None}


class Weights(Callback):
    """The weights after every step, once the step is over."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.strategy.between_steps:
            self.after.append(weights(pl_module))


def flat(average: dict[str, Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(values.flatten() for values in average.values())])


def shares(kind: str, count: int, decay: float) -> Tensor:
    """The weight of each of ``count`` iterates in the average, by the definition and not by the recursion."""
    if kind == "polyak":
        return torch.full((count,), 1 / count, dtype=torch.float64)
    if kind == "weighted":
        numbers = torch.arange(1, count + 1, dtype=torch.float64)
        return numbers / numbers.sum()
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(count)]
    kept = [torch.tensor(decays[i + 1 :], dtype=torch.float64).prod() for i in range(count)]
    return torch.stack([k * (1 - d if i else 1.0) for i, (k, d) in enumerate(zip(kept, decays, strict=True))])


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(("kind", "decay"), [("ema", 0.9999), ("ema", 0.3), ("polyak", 0.0), ("weighted", 0.0)])
def test_the_average_is_that_of_projected_weights(kind: Any, decay: float, start: int) -> None:
    """Of whole steps only, though each is three micro-batches."""
    averaging, recorder = ParameterAveraging(kind, decay, start), Weights()
    _, trainer = fit(make_plan(), recorder, averaging, module=make_module(rate=2.0), physical_batch_size=7)
    iterates = torch.stack(recorder.after[max(start - 1, 0) :])
    expected = shares(kind, len(iterates), decay) @ iterates
    assert len(recorder.after) == STEPS and torch.allclose(flat(averaging.weights()), expected, rtol=0, atol=1e-14)
    norms = trainer.strategy.mechanism.boundary()
    assert any(norm > 0.99 * maximum for norm, maximum in norms.values()), "the projection had nothing to do"
    before_projection = [row for row in averaging.certificate() if row["lipschitz"] > 1 + 1e-6]
    assert before_projection == []


def test_a_tiny_increment_is_not_lost() -> None:
    """What float32 would lose: with a decay of 0.9999 an iterate's share is below its resolution."""
    network = make_network()
    average = WeightAverage("ema", decay=1 - 1e-9)
    with torch.no_grad():
        for step in range(1, 4):
            average.update(network, step)
            next(network.parameters()).add_(0.5)
    assert not torch.equal(average.weights()["0.weight"].float().double(), average.weights()["0.weight"])


class Look(Callback):
    """What evaluations find in the module, and the averages at the same time."""

    def __init__(self, averaging: ParameterAveraging) -> None:
        self.averaging, self.found, self.steps = averaging, list[tuple[Tensor, Tensor]](), list[tuple[int, bool]]()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.found.append((weights(pl_module), flat(self.averaging.weights())))
        self.steps.append((trainer.global_step, getattr(trainer.strategy, "between_steps", True)))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def test_evaluations_see_the_average_and_training_does_not_notice() -> None:
    """Evaluated every second of three micro-batches, so also within steps, whose bounds must stay those of the step."""
    averaging = ParameterAveraging()
    look, quiet, loud = Look(averaging), Weights(), Weights()
    plan = make_plan()
    fit(plan, quiet, physical_batch_size=7)
    module, trainer = fit(
        plan, averaging, look, loud, physical_batch_size=7, data=BlobsWithValidation(), trainer_options=EVALUATED
    )
    assert all(torch.equal(a, b) for a, b in zip(quiet.after, loud.after, strict=True))
    assert len(look.found) > 10 and {between for _, between in look.steps} == {True, False}
    assert look.steps[0] == (0, False) and not len(look.found[0][1]), "there was an average before the first step"
    for found, average in look.found[1:]:
        assert torch.allclose(found, average, rtol=1e-6, atol=1e-7)
    last = weights(module)
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, datamodule=BlobsWithValidation(), **({} if run == trainer.predict else {"verbose": False}))
        assert torch.allclose(look.found[-1][0], flat(averaging.weights()), rtol=1e-6, atol=1e-7)
        assert torch.equal(weights(module), last) and not torch.allclose(look.found[-1][0], last, atol=1e-4)
    with averaging.last_weights():
        trainer.validate(module, datamodule=BlobsWithValidation(), verbose=False)
    assert torch.equal(look.found[-1][0], last)


class Copied(ParameterAveraging):
    """Broken on purpose: values are copied in place, as torch's and Lightning's averages are."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {n: p.detach().clone() for n, p in pl_module.network.named_parameters()}
        with torch.no_grad():
            for name, parameter in pl_module.network.named_parameters():
                parameter.copy_(self.average.weights().get(name, parameter))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.network.named_parameters():
                parameter.copy_(self.kept[name])


def test_weights_that_are_copied_in_place_are_noticed_within_a_step() -> None:
    with pytest.raises(AssertionError, match="the weights changed"):
        fit(make_plan(), Copied(), physical_batch_size=7, data=BlobsWithValidation(), trainer_options=EVALUATED)


class Failing(Callback):
    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step >= 4:
            raise InterruptedError("the evaluation fails")


class Saving(Callback):
    """Saves both kinds of checkpoint while the average is shown, and what training would save."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.trained = directory, {}

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 6 and trainer.strategy.between_steps:
            trainer.save_checkpoint(self.directory / "whole.ckpt", weights_only=False)
            trainer.save_checkpoint(self.directory / "weights.ckpt", weights_only=True)
            assert trainer.strategy.average.shown
            with trainer.strategy.average.trained_weights():
                self.trained = {k: v.clone() for k, v in pl_module.state_dict().items() if "_metrics" not in k}


def test_an_evaluation_that_fails_leaves_the_trained_weights() -> None:
    recorder, module = Weights(), make_module()
    with pytest.raises(InterruptedError):
        fit(
            make_plan(), ParameterAveraging(), recorder, Failing(), module=module, data=BlobsWithValidation(),
            trainer_options=EVALUATED,
        )  # fmt: skip
    assert torch.equal(weights(module), recorder.after[-1])


def test_checkpoints_of_an_evaluation_hold_what_training_continues_from(tmp_path: Path) -> None:
    saving, whole = Saving(tmp_path), ParameterAveraging("polyak")
    options: dict[str, Any] = {"data": BlobsWithValidation(), "trainer_options": EVALUATED}
    (tmp_path / "run").mkdir()
    module, _ = fit(make_plan(), whole, saving, directory=tmp_path / "run", **options)
    for name in ("whole.ckpt", "weights.ckpt"):
        state = torch.load(tmp_path / name, weights_only=False)["state_dict"]
        assert all(torch.equal(state[k], v) for k, v in saving.trained.items()) and saving.trained
    released, which = evaluated_state(torch.load(tmp_path / "whole.ckpt", weights_only=True))
    assert which == "averaged: polyak, over 6 steps"
    assert not torch.equal(released["network.0.weight"], saving.trained["network.0.weight"])
    again = ParameterAveraging("polyak")
    continued, trainer = fit(
        make_plan(), again, directory=tmp_path / "run", checkpoint=tmp_path / "whole.ckpt", **options
    )
    assert torch.equal(weights(continued), weights(module)) and trainer.strategy.branches.count == 1
    assert torch.equal(flat(again.weights()), flat(whole.weights()))


def test_best_checkpoints_of_lightning_work_beside_it(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="validation/accuracy", mode="max", save_top_k=1)
    averaging, recorder = ParameterAveraging(), Weights()
    options = {**EVALUATED, "enable_checkpointing": True}
    fit(make_plan(), keeper, averaging, recorder, data=BlobsWithValidation(), trainer_options=options)
    saved = torch.load(keeper.best_model_path, weights_only=False)
    trained = torch.cat([v.double().flatten() for k, v in saved["state_dict"].items() if k.startswith("network.")])
    assert torch.equal(trained, recorder.after[saved["global_step"] - 1])


def test_another_average_is_not_continued(tmp_path: Path) -> None:
    keeper = ResumeCheckpoint(tmp_path / "checkpoints")
    fit(make_plan(), ParameterAveraging("ema", 0.9), keeper, directory=tmp_path, trainer_options={"max_steps": 5})
    with pytest.raises(ValueError, match=r"another average of the weights.*0\.9.*HINT"):
        fit(
            make_plan(), ParameterAveraging("ema", 0.99), ResumeCheckpoint(tmp_path / "checkpoints"),
            directory=tmp_path, checkpoint=tmp_path / "checkpoints/last.ckpt",
        )  # fmt: skip


def test_a_second_run_of_the_same_callback_starts_anew() -> None:
    averaging = ParameterAveraging("polyak")
    fit(make_plan(), averaging)
    fit(make_plan(steps=4), averaging)
    assert averaging.average.count == 4 and averaging.average.step == 4


# ---- the certificate


@pytest.mark.parametrize("clips", [(), (("0", 0.1),)])
def test_the_certificate_is_that_of_the_average(clips: Any) -> None:
    averaging = ParameterAveraging("weighted")
    _, trainer = fit(make_plan(cotangent_clip=clips), averaging, module=make_module(rate=2.0))
    network = make_network()
    network.load_state_dict({k: v.float() for k, v in averaging.weights().items()})
    expected = certify(network, (6,), 1.0, "cross_entropy")
    norms = trainer.strategy.mechanism.boundary()
    for row, group in zip(averaging.certificate(), expected.groups, strict=True):
        assert row["name"] == group.name and row["lipschitz"] == pytest.approx(group.uses[0].lipschitz, rel=1e-9)
        assert row["lipschitz"] < 0.999 * norms[row["name"]][0], "the last weights were certified"
        if not clips:
            assert row["worst_case"] == pytest.approx(group.worst_case, rel=1e-6)


@pytest.mark.parametrize("projection", ["clip", "fixed", "bjorck"])
def test_averages_stay_in_the_ball_and_leave_the_sphere(projection: str) -> None:
    averaging = ParameterAveraging("polyak")
    plan = make_plan(projection=projection, max_norm=0.8)
    _, trainer = fit(plan, averaging, module=make_module(rate=2.0))
    last = [norm for norm, _ in trainer.strategy.mechanism.boundary().values()]
    mean = [row["lipschitz"] for row in averaging.certificate()]
    assert all(norm <= 0.8 * (1 + 1e-6) for norm in mean)
    if projection != "clip":
        assert min(last) > 0.79 and max(mean) < 0.79


def test_the_report_says_what_is_averaged_and_certified(tmp_path: Path) -> None:
    averaging, report = ParameterAveraging(), PrivacyReport(tmp_path)
    fit(make_plan(), report, averaging, data=BlobsWithValidation(), trainer_options=EVALUATED)
    assert report.facts is not None
    (note,) = [note for note in report.facts.notes if "averaged" in note]
    assert "ema, decay 0.9999, over 12 steps" in note and "certified anew" in note
    assert [row["name"] for row in report.facts.averaged_groups] == ["0", "2"]
    late = ParameterAveraging(start_step=99)
    fit(make_plan(), late)
    assert late.report_notes() == ["weights are averaged from step 99 on, which was not reached"]
    assert late.certificate() == [] and late.weights() == {}


def test_two_averages_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ParameterAveraging`"):
        fit(make_plan(), ParameterAveraging("ema"), ParameterAveraging("polyak"))


@pytest.mark.parametrize("bad", [{"kind": "mean"}, {"decay": 1.0}, {"start_step": -1}])
def test_settings_that_make_no_average_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        ParameterAveraging(**bad)


def test_without_a_private_strategy_there_is_nothing_to_average() -> None:
    trainer = make_trainer("auto", ParameterAveraging(), limit_val_batches=1.0)
    module = make_module()
    before = weights(module)
    trainer.validate(module, datamodule=BlobsWithValidation(), verbose=False)
    assert torch.equal(weights(module), before)
