"""The methods through a real Trainer: one key apart, resumable, private to every hook, and refusals by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from private_step import Branched, Tied
from small_runs import SECRET, Blobs, Crash, Gradients, fit, make_module, make_plan, weights
from torch import nn

from lipdp_lightning.callbacks import PrivacyReport, ResumeCheckpoint
from lipdp_lightning.data_modules.base import Rows
from lipdp_lightning.experiment import run_once, train
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.mechanism.allocation import sum_margin
from lipdp_lightning.training.settings import PrivacySettings

CLIPS = ("clip_flat", "clip_per_layer", "clip_ghost")
SMALL: dict[str, Any] = {
    "model": {
        "network": {
            "class_path": "lipdp_lightning.models.MLP",
            "init_args": {"input_shape": [30], "outputs": 1, "hidden": [8]},
        },
        "loss": "binary_cross_entropy",
    },
    "data": {"class_path": "data_modules.EmbeddedBreastCancer"},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "steps": 6, "batch_size": 100, "accountant": "rdp"},
    "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    "trainer": {"accelerator": "cpu", "devices": 1},
}


def clip_plan(scaling: str, **options: Any) -> Any:
    chosen = {"scaling": scaling, "clipping": "local", "clip_norm": 0.7, "max_norm": None, **options}
    return make_plan(**chosen)


# ---- settings


@pytest.mark.parametrize(
    ("method", "scaling", "projection", "max_norm"),
    [
        ("lipschitz", "joint", "bjorck", 2.0), ("worst_case", "worst_case", "clip", 2.0),
        ("fix_lip", "worst_case", "fixed", 2.0), ("dpsgd_flat", "clip_flat", "clip", None),
        ("dpsgd_per_layer", "clip_per_layer", "clip", None), ("dpsgd_ghost", "clip_ghost", "clip", None),
        ("nonprivate", "none", "clip", None),
    ],
)  # fmt: skip
def test_a_method_replaces_what_it_decides(method: Any, scaling: str, projection: str, max_norm: float | None) -> None:
    settings = PrivacySettings(
        noise_multiplier=1.5, steps=9, delta=1e-4, scaling="joint", projection="bjorck", max_norm=2.0, loss_clip=0.3,
        batch_size=50, method=method, clip_norm=0.25,
    )  # fmt: skip
    plan = settings.plan(1000)
    options = plan.to_dict()
    assert (plan.scaling, options["projection"], options["max_norm"]) == (scaling, projection, max_norm)
    ours = scaling in ("joint", "worst_case")
    assert plan.loss_clip == (0.3 if ours else None)
    assert options["clip_norm"] == (0.25 if method.startswith("dpsgd") else None)
    assert (plan.steps, plan.expected_batch_size) == (9, 50)
    assert plan.certified is (method != "nonprivate")


def test_the_budget_of_every_method_is_the_same() -> None:
    plans = [
        PrivacySettings(epsilon=2.0, steps=20, delta=1e-4, batch_size=1000, accountant="rdp", method=m).plan(1000)
        for m in ("lipschitz", "dpsgd_flat", "fix_lip")
    ]
    assert len({p.events() for p in plans}) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scaling": "clip_flat", "clipping": "soft", "clip_norm": 1.0}, "clipping 'soft'"),
        ({"scaling": "clip_flat", "clipping": "local"}, "clip_norm None"),
        ({"scaling": "clip_flat", "clipping": "local", "clip_norm": math.inf}, "clip_norm inf"),
        ({"scaling": "joint", "clip_norm": 1.0}, "ignores them"),
        ({"scaling": "none"}, "no noise makes it private"),
        ({"scaling": "joint", "switch_at": 0.5, "switch_to": "radius"}, "cannot switch"),
        ({"scaling": "batch_max", "switch_at": 0.5, "switch_to": "joint"}, "cannot switch"),
        ({"scaling": "joint", "switch_at": 1.5, "switch_to": "layerwise"}, "switch_at 1.5"),
        ({"scaling": "joint", "switch_to": "layerwise"}, "switch_at None"),
    ],
)
def test_plans_that_contradict_themselves(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(**options)


# ---- training


@pytest.mark.parametrize("scaling", CLIPS)
def test_a_run_that_crashes_ends_with_the_bits_of_one_that_does_not(tmp_path: Path, scaling: str) -> None:
    plan = clip_plan(scaling, switch_at=0.5, switch_to="global")
    whole, _ = fit(plan, physical_batch_size=10)
    saving = ResumeCheckpoint(directory=tmp_path, every_n_seconds=math.inf, every_n_steps=3)
    with pytest.raises(InterruptedError):
        fit(plan, saving, Crash(8), directory=tmp_path, physical_batch_size=10)
    again = ResumeCheckpoint(directory=tmp_path, every_n_seconds=math.inf, every_n_steps=3)
    rest, trainer = fit(plan, again, directory=tmp_path, checkpoint=tmp_path / "last.ckpt", physical_batch_size=10)
    assert trainer.strategy.branches.count == 1
    assert torch.equal(weights(whole), weights(rest))


@pytest.mark.parametrize("scaling", CLIPS)
def test_no_hook_sees_a_gradient_without_noise(scaling: str) -> None:
    """With noise far above the radius, what is seen is noise: of the size sigma R / (q N), and never smaller."""
    plan = clip_plan(scaling, noise_multiplier=1000.0)
    seen = Gradients()
    fit(plan, seen, physical_batch_size=10)
    assert len(seen.after_backward) == 2 * plan.steps
    assert all(found is None for found in seen.after_backward[0::2])  # between the micro-batches of a step
    for found in [*seen.after_backward[1::2], *seen.before_step]:
        assert found is not None
        assert 0.5 < float(found.square().mean().sqrt()) / (1000 * 0.7 / 20) < 2


def test_every_method_trains_and_says_what_it_guarantees(tmp_path: Path) -> None:
    for scaling in ("clip_per_layer", "none"):
        sigma = 0.0 if scaling == "none" else 1.0
        bounds = {} if scaling != "none" else {"clipping": None, "clip_norm": None}
        report = PrivacyReport(tmp_path / scaling)
        fit(clip_plan(scaling, noise_multiplier=sigma, **bounds), report)
        text = (tmp_path / scaling / "privacy_report.md").read_text()
        assert report.facts is not None and report.facts.certified is (scaling != "none")
        if scaling == "none":
            assert "NOT PRIVATE" in text and "the gradient of every step" in text and "epsilon =" not in text
        else:
            assert "the guarantee rests on clipping" in text and "DP-SGD" in text
            share = 0.7 / math.sqrt(len(report.facts.groups)) * sum_margin(20)
            assert report.facts.groups[0]["delta"] == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])
def test_optimizers_are_the_optimizer_key(optimizer: str) -> None:
    options: dict[str, Any] = {"lr": 0.01} | ({"momentum": 0.9} if optimizer == "RMSprop" else {})
    chosen = {"class_path": f"torch.optim.{optimizer}", "init_args": options}
    result = run_once(SMALL, {"optimizer": chosen, "privacy.method": "dpsgd_flat"}, secret=SECRET)
    assert result.certified and result.epsilon < math.inf and 0 <= result.score <= 1


class Refused(nn.Module):
    """Reads a weight without calling the layer that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + nn.functional.linear(x, self.first.weight))


class Circular(Blobs):
    input_shape = (1, 6)

    def load_train(self) -> Rows:
        x, y = super().load_train()
        return x.unsqueeze(1), y

    def load_test(self) -> None:
        return None


@pytest.mark.parametrize(
    ("network", "scaling", "reason"),
    [
        (Refused(), "clip_flat", "first.weight is read without its layer"),
        (nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Linear(8, 8), nn.Linear(8, 3)), "clip_flat", ""),
        (nn.Sequential(inner := nn.Linear(6, 6), nn.ReLU(), inner, nn.Linear(6, 3)), "clip_ghost", "more than once"),
    ],
)  # fmt: skip
def test_networks_that_opacus_cannot_take_apart(network: nn.Module, scaling: str, reason: str) -> None:
    if not reason:
        fit(clip_plan(scaling, steps=2), module=make_module(network=network))
        return
    with pytest.raises(ValueError, match=reason):
        fit(clip_plan(scaling, steps=2), module=make_module(network=network))


def problems_of(network: nn.Module, scaling: str, precision: str = "32-true", shape: tuple[int, ...] = (12,)) -> str:
    from lipdp_lightning.clipping.samplers import clipping_problems
    from lipdp_lightning.layers import make_private

    return "\n".join(clipping_problems(make_private(network), shape, clip_plan(scaling), precision))


def test_refusals_name_the_module_and_the_way_out() -> None:
    conv = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(2, 2))
    assert "0 pads with mode 'circular'" in problems_of(conv, "clip_flat", shape=(1, 4, 4))
    assert "trains plain" in problems_of(Branched(), "clip_flat")
    assert "used more than once" in problems_of(Tied(), "clip_ghost")
    assert problems_of(Tied(), "clip_flat") == ""
    assert "bf16" in problems_of(nn.Linear(6, 3), "clip_flat", "bf16-mixed", (6,))
    for text in (
        problems_of(conv, "clip_flat", shape=(1, 4, 4)),
        problems_of(Branched(), "clip_flat"),
        problems_of(Tied(), "clip_ghost"),
    ):
        assert all("HINT:" in line for line in text.splitlines())


def test_a_wrong_padding_would_change_the_gradient_that_opacus_sees() -> None:
    """Why circular padding is refused: taken for zeros, its border taps are missed."""
    from opacus.grad_sample.conv import compute_conv_grad_sample

    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    x = torch.zeros(1, 1, 4, 4)
    x[..., 0, 0] = 1.0
    layer(x).sum().backward()
    seen = compute_conv_grad_sample(layer, [x], torch.ones(1, 1, 4, 4))[layer.weight][0]
    assert layer.weight.grad is not None
    assert seen.norm() < 0.9 * layer.weight.grad.norm()


# ---- short trainings


def test_run_once_writes_nothing_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = run_once(SMALL, {"privacy.steps": 4}, secret=SECRET)
    second = run_once(SMALL, {"privacy.steps": 4}, secret=SECRET)
    other = run_once(SMALL, {"privacy.steps": 4})
    assert list(tmp_path.iterdir()) == []
    assert first.metrics == second.metrics and torch.equal(weights(first.module), weights(second.module))
    assert not torch.equal(weights(first.module), weights(other.module))
    names = ("loss", "accuracy", "majority_rate", "standard_error", "balanced_accuracy", "auroc")
    assert first.steps == 4 and first.certified and set(first.metrics) == {f"validation/{name}" for name in names}
    assert first.score == first.metrics["validation/accuracy"]
    assert SMALL["privacy"]["steps"] == 6  # the caller's mapping stays as it was


def test_run_once_calibrates_a_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp_lightning.budget import calibrate

    calls = []
    own = calibrate.calibrate_noise
    monkeypatch.setattr(calibrate, "calibrate_noise", lambda *a, **k: calls.append(a) or own(*a, **k))
    budget = {
        "privacy.noise_multiplier": None, "privacy.epsilon": 1.234, "privacy.steps": 3, "privacy.batch_size": 455,
        "privacy.accountant": "rdp",
    }  # fmt: skip
    results = [
        run_once(SMALL, {**budget, "privacy.method": method, "seed_everything": seed})
        for method, seed in (("lipschitz", 1), ("dpsgd_flat", 2), ("worst_case", 3))
    ]
    assert len(calls) == 1
    assert len({r.plan.noise_multiplier for r in results}) == 1 and all(r.epsilon <= 1.234 for r in results)
    run_once(SMALL, {**budget, "privacy.steps": 4})
    assert len(calls) == 2


def test_a_guarantee_is_that_of_the_plan() -> None:
    result = run_once(SMALL, {"privacy.method": "nonprivate"})
    assert result.epsilon == math.inf and not result.certified and any("not private" in w for w in result.warnings)
    from lipdp_lightning.accounting.accountants import epsilon_of

    plan = run_once(SMALL, {}).plan
    expected = epsilon_of("rdp", plan.events(), plan.delta).epsilon
    assert run_once(SMALL, {}).epsilon == pytest.approx(expected, rel=1e-12)


def test_train_takes_objects() -> None:
    plan = clip_plan("clip_ghost", steps=5)
    result = train(make_module(), Blobs(), plan, secret=SECRET)
    assert result.plan == plan and result.steps == 5 and "validation/accuracy" in result.metrics
    same, _ = fit(plan)
    assert torch.equal(weights(result.module), weights(same))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"privacy.method": "dpsgd"}, "method"),
        ({"privacy.clip_norm": -1.0, "privacy.method": "dpsgd_flat"}, "clip_norm -1.0"),
        ({"privacy.clipnorm": 1.0}, "clipnorm"),
        ({"seed_everything.value": 1}, "seed_everything"),
        ({"privacy.method": "dpsgd_flat", "trainer.precision": "bf16-mixed"}, "bf16-mixed"),
    ],
)
def test_overrides_that_make_no_sense(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run_once({**SMALL, "seed_everything": 1}, overrides)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    for name, reason in (("list.yaml", "holds no configuration"), ("broken.yaml", "not YAML"), ("none", "be read")):
        with pytest.raises(ValueError, match=reason) as caught:
            run_once(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_the_plan_knows_its_new_fields_again() -> None:
    plan = clip_plan("clip_flat", switch_at=0.9, switch_to="global")
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert plan.digest() != type(plan).from_dict({**plan.to_dict(), "switch_at": 0.8}).digest()
