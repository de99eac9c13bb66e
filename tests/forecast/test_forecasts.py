"""Forecasts: from public numbers alone, repeatable, and right about networks that learn and that do not."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.forecast import NoForecast, forecast, read_public_rows
from lipdp_lightning.forecast.forecasts import Forecast
from lipdp_lightning.forecast.public_rows import PublicRows, made_up_rows
from lipdp_lightning.forecast.public_training import (
    FEWEST_ROWS,
    FEWEST_STEPS,
    LayerSignal,
    Outcome,
    PublicTraining,
    Size,
    _detached_copy,
    size_of,
)
from lipdp_lightning.layers.scaled import ScaledLayer
from lipdp_lightning.models import ConvNet, Linear, WideResNet
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.automatic_scaling import settle

SHAPE = (1, 8, 8)


class Declared(PrivateDataModule):
    """Declarations, and rows that nobody may load."""

    input_shape, task, num_classes, declared_size = SHAPE, "classification", 10, 1438

    def load_train(self) -> Any:
        raise AssertionError("private rows were loaded")


def module_of(network: nn.Module | None = None, lr: float = 0.02, **options: Any) -> PrivateModule:
    torch.manual_seed(1)
    network = ConvNet(SHAPE, 10) if network is None else network
    return PrivateModule(network, input_mode="normalize", optimizer=lambda p: torch.optim.Adam(p, lr=lr), **options)


def plan_of(module: PrivateModule, epsilon: float = 3.0, **options: Any) -> PrivacyPlan:
    plan = PrivacyPlan.create(
        dataset_size=1438, expected_batch_size=360, epochs=20, epsilon=epsilon, delta=1e-4, **options
    )
    return settle(plan, module, Declared())[0]


def forecast_of(module: PrivateModule, **options: Any) -> Any:
    return forecast(module, plan_of(module, **options), Declared())


def test_it_tells_bounds_from_exact_norms_on_a_convolutional_network() -> None:
    """Real runs end at 16 % with joint bounds and at 91 % with exact norms."""
    module = module_of()
    bounds, exact = forecast_of(module, scaling="joint"), forecast_of(module)
    assert not bounds.learns and "not expected to learn" in bounds.verdict()
    assert f"the signal of {bounds.weakest.name} is" in bounds.verdict()
    assert "HINT: leave privacy.scaling" in bounds.verdict()
    assert exact.learns and exact.scaling == "exact" and exact.verdict().startswith("this run is expected to learn")
    assert min(s.over_run for s in exact.outcome.signals) > 2 * min(s.over_run for s in bounds.outcome.signals)


def test_it_sees_that_noise_drowns_a_network() -> None:
    module = module_of()
    drowned = forecast_of(module, epsilon=0.03)
    assert not drowned.learns and "the noise is too large" in drowned.verdict()


def test_it_loads_no_private_row_and_changes_nothing() -> None:
    module = module_of()
    plan = plan_of(module)
    weights = copy.deepcopy(module.state_dict())
    state, training = torch.random.get_rng_state(), module.training
    first, second = (forecast(module, plan, Declared()) for _ in range(2))
    assert first == second, "a forecast repeats itself"
    assert torch.equal(torch.random.get_rng_state(), state) and module.training is training
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(AssertionError, match="private rows were loaded"):  # what the test would have seen
        Declared().setup()


def test_a_signal_is_the_norm_of_the_mean_gradient_over_that_of_the_noise() -> None:
    """Compared with gradients by autograd, at weights that do not move."""
    network = Linear(SHAPE, 10, zero_init=False)
    module = module_of(network, lr=1e-12)
    plan = plan_of(module, scaling="worst_case", max_norm=None)
    size = Size(6, 100)
    rows = made_up_rows(SHAPE, "classification", 10, 1.0, 400, seed=3)
    found = PublicTraining(module, plan, SHAPE).run(rows, size)
    x, y = rows.x[: 400 - 100], rows.y[: 400 - 100]
    gradients = []
    for half in range(2 * size.steps):
        taken = torch.arange(half * 50, (half + 1) * 50) % len(x)
        loss = nn.functional.cross_entropy(network(x[taken]), y[taken])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, network.parameters())]).double())
    products = [float(a @ b) for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    signal = math.sqrt(sum(products) / len(products))
    # one layer with a bias, inputs of norm 1: its gradient is at most sqrt(2) * sqrt(2)
    noise = plan.noise_multiplier * 2.0 * math.sqrt(650) / 360
    (layer,) = found.signals
    assert layer.per_step == pytest.approx(signal / noise, rel=1e-3)
    assert layer.over_run == pytest.approx(layer.per_step * math.sqrt(plan.steps))
    assert layer.per_step != pytest.approx(signal / (2 * noise), rel=0.1), "the check tells noise of another size"


def test_a_network_of_which_no_layer_can_learn() -> None:
    dead = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        dead[1].bias.fill_(-100.0)
        dead[3].bias.fill_(0.0)
    dead[3].bias.requires_grad_(False)
    found = forecast_of(module_of(dead))
    assert not found.learns and "no layer has any signal" in found.verdict()
    frozen = module_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    plan = plan_of(frozen)
    frozen.requires_grad_(False)
    with pytest.raises(NoForecast, match=r"no layer is trained.*HINT"):
        forecast(frozen, plan, Declared())


@pytest.mark.filterwarnings("ignore::lipdp_lightning.privacy.plan.NonCertifiedWarning")
def test_what_has_no_forecast_says_why() -> None:
    module = module_of()
    without_noise = PrivacyPlan.from_dict(
        plan_of(module).to_dict()
        | {"scaling": "none", "radius": None, "noise_multiplier": 0.0, "allow_noncertified": True}
    )
    with pytest.raises(NoForecast, match="there is no noise"):
        forecast(module, without_noise, Declared())
    unsettled = PrivacyPlan.create(
        dataset_size=1438, expected_batch_size=360, steps=2, noise_multiplier=1.0, delta=1e-4
    )
    with pytest.raises(NoForecast, match="not settled"):
        forecast(module, unsettled, Declared())


def test_made_up_rows_that_do_not_fit_ask_for_public_ones() -> None:
    module = module_of()
    plan = plan_of(module)
    module.bounded_input.forward = lambda x: torch.ones(3)[x.long() + 10]  # as an embedding of words would
    with pytest.raises(NoForecast, match=r"a step fails on made-up rows.*HINT: --public-inputs"):
        forecast(module, plan, Declared())


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_made_up_rows_are_within_what_is_declared(task: str) -> None:
    outputs = 10 if task == "classification" else 1
    rows = made_up_rows(SHAPE, task, outputs, 8.0, 60, seed=0)
    assert rows.x.shape == (60, *SHAPE) and len(rows) == 60
    assert torch.linalg.vector_norm(rows.x.flatten(1), dim=1).allclose(torch.tensor(8.0))
    again, other = (made_up_rows(SHAPE, task, outputs, 8.0, 60, seed=seed) for seed in (0, 1))
    assert torch.equal(rows.x, again.x) and not torch.equal(rows.x, other.x)
    if task == "classification":
        assert rows.y.bincount().tolist() == [6] * 10


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_other_tasks_have_forecasts(task: str) -> None:
    loss = {"binary": "binary_cross_entropy", "regression": "huber"}[task]
    torch.manual_seed(1)
    module = PrivateModule(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), loss=loss, input_mode="normalize",
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    )  # fmt: skip
    easy, hard = forecast_of(module, epsilon=8.0), forecast_of(module, epsilon=0.01)
    assert easy.learns and not hard.learns


@pytest.mark.parametrize("operations", [1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("steps", [1, 50, 10_000])
def test_the_cost_is_bounded(operations: float, steps: int) -> None:
    size = size_of(operations, steps, 10, 1e10)
    assert size.steps >= 2 and size.rows >= FEWEST_ROWS
    assert operations * size.steps * size.rows <= max(1e10, operations * (FEWEST_STEPS * FEWEST_ROWS))


def test_a_network_that_is_too_large_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublicTraining, "operations", lambda self, x: 1e13)
    with pytest.raises(NoForecast, match=r"operations.*HINT"):
        forecast_of(module_of())


def test_after_few_steps_the_signal_decides() -> None:
    """Eight steps end near chance with a step size that is too small for so few; the signal tells the two apart."""
    few = Size(FEWEST_STEPS, FEWEST_ROWS)
    verdicts = {}
    for scaling in ("auto", "joint"):
        module = module_of(lr=1e-4)
        verdicts[scaling] = forecast(module, plan_of(module, scaling=scaling), Declared(), size=few)
    exact, joint = verdicts["auto"], verdicts["joint"]
    assert exact.short and exact.outcome.score < exact.needed and exact.learns and "by its signal" in exact.verdict()
    assert joint.short and not joint.learns and joint.typical.over_run < 0.25


@pytest.mark.parametrize(("score", "uncertain"), [(0.24, True), (0.26, False), (0.8, False)])
def test_a_score_near_what_is_needed_says_that_the_run_may_end_below(score: float, uncertain: bool) -> None:
    signal = LayerSignal("layer", per_step=1.0, over_run=9.0)
    found = Forecast(Outcome((signal,), score, 0.1, Size(32, 40)), "made-up rows", "exact")
    assert found.learns and found.uncertain is found.as_dict()["uncertain"] is uncertain
    assert ("close to 0.20, below which a run has learnt nothing" in found.verdict()) is uncertain


def test_a_head_alone_that_has_a_signal_is_no_promise() -> None:
    """With a floor of 1 in its normalisations, hardly anything of the input passes a deep network."""
    few, found = Size(FEWEST_STEPS, FEWEST_ROWS), {}
    for floor in (1.0, 0.1):
        torch.manual_seed(1)
        network = WideResNet(SHAPE, 10, 10, 1, norm_groups=4, norm_alpha=floor)
        module = PrivateModule(network, input_mode="normalize", optimizer=lambda p: torch.optim.SGD(p, lr=2.0))
        plan = plan_of(module, epsilon=8.0)
        found[floor] = forecast(module, plan, Declared(), size=few)
    assert found[1.0].strongest.over_run > 0.5 > found[1.0].typical.over_run * 2 and not found[1.0].learns
    assert found[0.1].typical.over_run > 0.5 and found[0.1].learns


def test_tied_layers_have_a_forecast_under_the_scaling_that_auto_chooses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(torch.relu(self.layer(x.flatten(1)))))

    module = module_of(Twice())
    found = forecast_of(module)
    assert found.scaling == "exact" and {s.name for s in found.outcome.signals} == {"layer", "head"} and found.learns


def test_public_rows_of_a_file_are_used(tmp_path: Any) -> None:
    rows = made_up_rows(SHAPE, "classification", 10, 1.0, 300, seed=5)
    np.savez(tmp_path / "rows.npz", x=rows.x.numpy(), y=rows.y.numpy())
    inputs = read_public_rows(tmp_path / "rows.npz", SHAPE, "classification", 10)
    module = module_of()
    found = forecast(module, plan_of(module), Declared(), inputs)
    assert found.source.endswith("rows.npz") and found.source in found.verdict() and found.learns
    noise = PublicRows(torch.randn(300, *SHAPE), torch.arange(300) % 10, "rows that say nothing of their labels")
    assert not forecast(module, plan_of(module), Declared(), noise).learns


X, Y = np.zeros((4, 1, 8, 8), dtype="float32"), np.arange(4)
BAD_FILES = {
    "shape": dict(x=X[:, 0], y=Y),
    "count": dict(x=X, y=Y[:3]),
    "one row": dict(x=X[:1], y=Y[:1]),
    "label": dict(x=X, y=Y + 7),
    "half a label": dict(x=X, y=Y / 2),
    "infinite": dict(x=X + np.inf, y=Y),
    "text": dict(x=X.astype(str), y=Y),
    "objects": dict(x=np.array([{}] * 4, dtype=object), y=Y),
    "no labels": dict(x=X),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_with_a_hint(tmp_path: Any, kind: str) -> None:
    np.savez(tmp_path / "rows.npz", **BAD_FILES[kind])
    with pytest.raises(ValueError, match=r"--public-inputs .*HINT"):
        read_public_rows(tmp_path / "rows.npz", SHAPE, "classification", 10)


def test_a_file_that_is_none_is_refused(tmp_path: Any) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    for path in (tmp_path / "text.npz", tmp_path / "absent.npz", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read.*HINT"):
            read_public_rows(path, SHAPE, "classification", 10)


def test_a_copy_of_an_attached_network_has_its_plain_values_and_none_of_its_receivers() -> None:
    module = PrivateModule(Linear((3,), 2), "cross_entropy", 1.0)
    layer = next(m for m in module.network.modules() if isinstance(m, ScaledLayer))
    layer.report_to(scaler=lambda norms: norms)
    module.network.flag = False  # type: ignore[assignment]
    network, _ = _detached_copy(module)
    copied = next(m for m in network.modules() if isinstance(m, ScaledLayer))
    assert network.flag is False and copied.tensor_cores is False and copied.gradient_scaler is None
