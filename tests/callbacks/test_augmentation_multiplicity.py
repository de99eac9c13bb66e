"""Runs whose examples enter a step as the mean over several views."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, Crash, Gradients, fit, make_module, make_plan, weights
from torch import Tensor, nn

from lipdp_lightning.augmentations import Augmentation, Draws
from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.callbacks import AugmentationMultiplicity, ParameterAveraging, ResumeCheckpoint

LAST = "checkpoints/last.ckpt"


class Shift(Augmentation):
    def __init__(self, size: float = 0.3) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        return x + self.size * (draws.uniform(x[0].numel()) - 0.5).reshape(x.shape).to(x.dtype)


class Dim(nn.Module):
    """One draw of torch's generator for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.8 + 0.2 * torch.rand((), device=x.device))


def views(number: int = 4, *augmentations: nn.Module) -> AugmentationMultiplicity:
    return AugmentationMultiplicity(number, list(augmentations) or [Shift(), Dim()])


def dropout_module() -> Any:
    torch.manual_seed(0)
    return make_module(network=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)))


class Batches(Callback):
    """Rows that were loaded, and rows that went through the network, per micro-batch."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.passed: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network[0].register_forward_hook(TrustedHook(lambda m, i, o: self.passed.append(i[0].detach())))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.loaded.append(len(batch[0]))


def test_k_views_are_k_rows_of_one_loaded_example_and_bounded_after_the_augmentation() -> None:
    class Wild(Augmentation):
        def forward(self, x: Tensor, draws: Draws) -> Tensor:
            wild = torch.where(draws.uniform(1) < 0.3, float("nan"), 1e6 * draws.uniform(1))
            return x * wild.to(x.dtype)

    seen = Batches()
    fit(make_plan(steps=4), views(5, Wild()), seen)
    assert [len(rows) for rows in seen.passed] == [5 * count for count in seen.loaded]
    rows = torch.cat(seen.passed)
    assert sum(seen.loaded) < 2 * 4 * 20 and torch.isfinite(rows).all()
    assert 0.9 < float(rows.norm(dim=1).max()) <= 1.0 + 1e-6


def test_micro_batches_and_empty_samples_do_not_change_the_release() -> None:
    """The physical batch counts views; what an example's views are does not depend on how a step is cut."""
    plan = make_plan(noise_multiplier=0.0, expected_batch_size=2.5, steps=25)
    runs = {}
    for size in (None, 4, 8):
        options = {"precision": "64-true"}
        seen = Batches()
        module, trainer = fit(
            plan, views(4), seen, module=dropout_module(), physical_batch_size=size, trainer_options=options
        )
        runs[size] = weights(module)
        assert trainer.strategy.chunks == {None: 1, 4: 2, 8: 1}[size]
        assert 0 in seen.loaded, "no empty micro-batch was tried"
    assert torch.allclose(runs[None], runs[4], rtol=0, atol=1e-12)
    without, _ = fit(plan, module=dropout_module(), trainer_options={"precision": "64-true"})
    assert (weights(without) - runs[None]).abs().max() > 1e-3, "views changed nothing"


def test_dropout_masks_belong_to_example_and_view() -> None:
    masks: list[dict[int, Tensor]] = []

    class Record(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def record(layer: Any, inputs: Any, output: Tensor) -> None:
                masks.append(dict(zip(layer.context[1].tolist(), output.detach() != 0, strict=True)))

            pl_module.network[1].register_forward_hook(TrustedHook(record))

    class Fewer(Blobs):
        def load_train(self) -> tuple[Tensor, Tensor]:
            x, y = super().load_train()
            return x[:58], y[:58]

    for data in (Blobs(), Fewer()):
        fit(make_plan(steps=1), views(3, nn.Identity()), Record(), module=dropout_module(), data=data)
    whole, without = masks
    common = [number for number in whole if number in without]
    assert len(common) > 30 and all(torch.equal(whole[n], without[n]) for n in common)
    first = common[0] - common[0] % 3
    assert not torch.equal(whole[first], whole[first + 1]), "one mask for all views of an example"


def session(directory: Path, *callbacks: Any, crash: int | None = None, **options: Any) -> Any:
    directory.mkdir(exist_ok=True)
    keeper = ResumeCheckpoint(directory / "checkpoints", every_n_steps=3)
    checkpoint = directory / LAST if (directory / LAST).exists() else None
    crashes = [] if crash is None else [Crash(crash)]
    options = {"directory": directory, "checkpoint": checkpoint, **options}
    if crash is None:
        return fit(make_plan(steps=12), *callbacks, keeper, **options)
    with pytest.raises(InterruptedError):
        fit(make_plan(steps=12), *callbacks, *crashes, keeper, **options)
    return None


@pytest.mark.parametrize("crash", [2, 6, 11])
def test_a_continued_run_repeats_its_views_and_ends_with_the_same_bits(tmp_path: Path, crash: int) -> None:
    """Also those that plain modules draw from torch's generator, and the average of the weights."""
    options: dict[str, Any] = {"physical_batch_size": 30}
    average = ParameterAveraging("weighted")
    whole, _ = session(tmp_path / "whole", views(), average, module=dropout_module(), **options)
    run = tmp_path / "run"
    session(run, views(), ParameterAveraging("weighted"), crash=crash, module=dropout_module(), **options)
    torch.manual_seed(99)  # another process, whose generator is somewhere else
    again = ParameterAveraging("weighted")
    module, trainer = session(run, views(), again, module=dropout_module(), **options)
    assert torch.equal(weights(module), weights(whole)) and trainer.strategy.branches.count == 1
    assert again.average.count == 12
    for name, values in average.weights().items():
        assert torch.equal(again.weights()[name], values)


def test_other_augmentations_are_another_branch(tmp_path: Path) -> None:
    """A step repeated with other views would be a second release on the same sample."""
    session(tmp_path, views(4, Shift(0.3)), trainer_options={"max_steps": 5})
    secret = json.loads((tmp_path / "ledger.json").read_text())["branches"][0]["id"]
    _, trainer = session(tmp_path, views(4, Shift(0.31)))
    branches = json.loads((tmp_path / "ledger.json").read_text())["branches"]
    assert trainer.strategy.branches.count == 2 and branches[1]["id"] != secret


def test_the_bound_and_the_noise_are_those_of_one_view() -> None:
    def run(*callbacks: Callback) -> tuple[Any, Any]:
        recorder = Gradients()
        _, trainer = fit(make_plan(steps=1), *callbacks, recorder)
        return trainer.strategy.mechanism.deviations(), recorder.before_step[0]

    (one, _), (several, _) = run(), run(views(16, nn.Identity()))
    margin = 1 + 2.0**-23 * 20 * 16 + 1e-9  # of a sum of so many rows in float32
    assert all(one[name] <= several[name] <= one[name] * margin for name in one)


@pytest.mark.parametrize(
    ("callbacks", "options", "reason"),
    [
        ([views(4), views(4)], {}, "2 callbacks make views"),
        ([views(16)], {"physical_batch_size": 8}, r"one example has 16 of them.*at least 16"),
        ([views(2, nn.BatchNorm1d(6))], {}, "augmentation BatchNorm1d"),
        ([AugmentationMultiplicity()], {}, r"HorizontalFlip was given rows of shape \(6,\)"),
    ],
)
def test_what_cannot_work_is_refused_in_set_up(callbacks: list[Callback], options: Any, reason: str) -> None:

    with pytest.raises(ValueError, match=r"cannot be trained privately") as found:
        fit(make_plan(), *callbacks, **options)
    assert re.search(reason, str(found.value), re.DOTALL) and "HINT" in str(found.value)
