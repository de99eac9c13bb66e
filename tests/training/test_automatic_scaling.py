"""The scaling `auto`: decided from the certificate alone, alike on every process and in every resume."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds import Bound, Operation, ParameterUse, Value, rule
from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.bounds.losses import BinaryCrossEntropy, CrossEntropy, Loss
from lipdp_lightning.data_modules import Digits
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.experiment.short_training import prepare, train
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.layers.scaled import ScaledLinear
from lipdp_lightning.models import ConvNet, Linear, WideResNet
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.automatic_scaling import LARGEST_NORMS, choose_scaling, settle, with_scaling

SHAPE = (1, 8, 8)


class Declared(PrivateDataModule):
    """Digits' declarations, and rows that nobody may load."""

    input_shape, task, num_classes, declared_size = SHAPE, "classification", 10, 1438

    def load_train(self) -> Any:
        raise AssertionError("private rows were loaded")


class Gain(nn.Module):
    """A layer that no mechanism can measure by example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@rule(Gain)
def gain(op: Operation, x: Value) -> Bound:
    """The gradient d * x has norm at most ||d|| ||x||."""
    largest = float(op.module.weight.detach().abs().max())  # type: ignore[union-attr, operator]
    return Bound(largest * x.norm, largest, uses=(ParameterUse((op.module.weight,), x.norm),))  # type: ignore[union-attr]


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(x.flatten(1))))


class OwnForward(ScaledLinear):
    """A layer with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def frozen_then(*layers: nn.Module) -> nn.Sequential:
    first = nn.Linear(64, 64)
    first.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, *layers)


def frozen_after() -> nn.Sequential:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10))
    network[2].requires_grad_(False)
    return network


def plan_of(**options: Any) -> PrivacyPlan:
    return PrivacyPlan.create(
        dataset_size=1438, expected_batch_size=360, steps=2, noise_multiplier=1.0, delta=1e-4, **options
    )


def settled(network: nn.Module, **options: Any) -> tuple[PrivacyPlan, str]:
    module = PrivateModule(network, input_bound=1.0, input_mode="normalize")
    return settle(plan_of(**options), module, Declared())


@pytest.mark.parametrize(
    ("network", "scaling", "reason"),
    [
        (Linear(SHAPE, 10), "joint", "one dense layer on vectors, whose bound is tight"),
        (frozen_then(nn.Linear(64, 10)), "joint", "one dense layer"),
        (nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), "joint", "one dense layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 32), MaxMin(), nn.Linear(32, 10)), "exact", "2 layers are trained"),
        (nn.Sequential(nn.Conv2d(1, 10, 1), nn.AvgPool2d(8), nn.Flatten()), "exact", "64 positions"),
        (ConvNet(SHAPE, 10), "exact", "features.0 sums over 16 positions, which makes its bound about 4 times too"),
        (Twice(), "exact", "layer has 2 uses (tied weights), whose norms add"),
        (frozen_after(), "exact", "what follows 1 loosens its bound"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Gain()), "joint", "in 2 cannot be measured"),
    ],
)
def test_the_structure_decides(network: nn.Module, scaling: str, reason: str) -> None:
    plan, why = settled(network)
    assert plan.scaling == scaling and reason in why


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(temperature=0.1), BinaryCrossEntropy(temperature=5.0)])
def test_one_layer_is_clipped_to_half_of_the_bound_on_its_gradient(loss: Loss) -> None:
    outputs = 1 if isinstance(loss, BinaryCrossEntropy) else 10
    module = PrivateModule(Linear(SHAPE, outputs), loss, input_bound=1.0, input_mode="normalize")
    plan, reason = settle(plan_of(), module, Declared())
    assert plan.loss_clip == pytest.approx(loss.lipschitz((outputs,)) / 2, rel=5e-3)
    assert f"clipped to {plan.loss_clip:g}, half of its bound" in reason
    certificate = Certifier(module.network, SHAPE, 1.0, module.private_loss(plan.loss_clip)).certify()
    open_ended = Certifier(module.network, SHAPE, 1.0, loss).certify()
    assert certificate.groups[0].worst_case < 0.51 * open_ended.groups[0].worst_case
    given, why = settle(plan_of(loss_clip=0.2), module, Declared())
    assert given.loss_clip == 0.2 and "clipped" not in why
    assert settle(plan_of(scaling="joint"), module, Declared())[0].loss_clip is None


def test_several_layers_are_not_clipped_at_the_outputs() -> None:
    assert settled(ConvNet(SHAPE, 10))[0].loss_clip is None
    assert settled(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Gain()))[0].loss_clip is None


def test_a_layer_of_its_own_kind_is_not_measured() -> None:
    network = nn.Sequential(nn.Flatten(), OwnForward(64, 32), nn.Linear(32, 10))
    scaling, reason = choose_scaling(network, SimpleNamespace(groups=()))
    assert scaling == "joint" and "in 1 cannot be measured" in reason


def test_weights_do_not_decide() -> None:
    """Otherwise a resume, or a rank with other weights, could train under another plan."""
    for network in (ConvNet(SHAPE, 10), Linear(SHAPE, 10)):
        other = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(7 * torch.randn_like(parameter))
        first, second = settled(network), settled(other)
        assert first == second and first[0].digest() == second[0].digest()


@pytest.mark.parametrize(
    ("options", "scaling", "settled"),
    [
        (dict(), "joint", dict(allocation="optimal", max_norm=8.0, radius=None)),
        (dict(), "exact", dict(allocation="global", max_norm=8.0, radius=1.0)),
        (dict(radius=3.0, max_norm=None), "exact", dict(allocation="global", max_norm=None, radius=3.0)),
        (dict(radius=3.0, allocation="equal"), "joint", dict(allocation="equal", max_norm=8.0, radius=None)),
        (dict(projection="bjorck"), "exact", dict(projection="bjorck", max_norm=1.0, radius=1.0)),
    ],
)
def test_what_is_open_is_settled_and_what_was_given_stays(
    options: dict[str, Any], scaling: Any, settled: dict[str, Any]
) -> None:
    left_open = plan_of(**options, free_layers=["head"], scaling_floor=1e-3, accountant="rdp")
    assert not left_open.is_settled and left_open.scaling == "auto" and left_open.certified
    found = with_scaling(left_open, scaling, 8.0)
    assert found.is_settled and found.events() == left_open.events()
    values, before = found.to_dict(), left_open.to_dict()
    assert values == values | {"scaling": scaling} | settled
    for name in ("scaling", "allocation", "max_norm", "radius"):
        del values[name], before[name]
    assert values == before


def test_what_the_user_gave_stays() -> None:
    plan, _ = settled(ConvNet(SHAPE, 10), radius=0.5, max_norm=2.0, allocation="equal")
    options = plan.to_dict()
    assert (options["radius"], options["max_norm"], options["allocation"]) == (0.5, 2.0, "equal")
    joint, _ = settled(Linear(SHAPE, 10), radius=0.5)
    assert joint.to_dict()["radius"] is None
    named = plan_of(scaling="worst_case")
    assert settle(named, PrivateModule(ConvNet(SHAPE, 10)), Declared()) == (named, "")


@pytest.mark.parametrize("depth", [10, 16, 40])
def test_no_weights_within_the_largest_norm_make_the_certificate_infinite(depth: int) -> None:
    """With twice the norm, the deepest of these networks would end its run with an error."""
    network = WideResNet(SHAPE, 10, depth=depth, width=1)
    norm = settled(network)[0].to_dict()["max_norm"]
    assert norm in (*LARGEST_NORMS, 1.0) and (depth < 40 or norm < 8)
    with torch.no_grad():  # every layer at its norm, and biases that have grown
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                parameter.fill_(1.0)
                parameter.mul_(norm / torch.linalg.matrix_norm(parameter.flatten(1), 2) / 3)
            elif "bias" in name:
                parameter.fill_(3.0)
    private = PrivateModule(network, input_bound=1.0).network
    Certifier(private, SHAPE, 1.0, "cross_entropy").certify()


def test_set_up_settles_the_plan_of_a_strategy_and_trains() -> None:
    data = Digits()
    plan = PrivacyPlan.create(
        dataset_size=data.dataset_size, expected_batch_size=360, steps=2, noise_multiplier=1.0, delta=1e-4
    )
    torch.manual_seed(1)
    module = PrivateModule(ConvNet(SHAPE, 10), input_mode="normalize")
    result = train(module, data, plan)
    assert result.plan.scaling == "exact" and result.plan.events() == plan.events()
    assert plan.scaling == "auto", "a plan is frozen"


def test_a_configuration_without_a_scaling_gets_one_with_its_reason() -> None:
    network = {"class_path": "lipdp_lightning.models.ConvNet", "init_args": {"input_shape": [1, 8, 8], "outputs": 10}}
    content = {
        "model": {"network": network},
        "data": {"class_path": "data_modules.Digits"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "steps": 2, "batch_size": 360},
        "optimizer": {"class_path": "torch.optim.Adam"},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }
    prepared = prepare(content)
    assert prepared.plan.scaling == "exact" and prepared.experiment.trainer.strategy.plan == prepared.plan
    assert "positions" in prepared.experiment.trainer.strategy.scaling_reason
    assert prepare(content | {"privacy": content["privacy"] | {"scaling": "joint"}}).experiment.scaling_reason == ""


def test_a_network_without_a_certificate_is_refused_by_the_check_and_not_by_the_choice() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network.register_parameter("extra", nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"extra: this trained parameter has no bound") as caught:
        train(PrivateModule(network), Digits(), plan_of())
    assert "auto" not in str(caught.value)


@pytest.mark.parametrize("scaling", ["auto", "joint"])
def test_a_network_of_which_nothing_is_trained_is_refused(scaling: str) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no layer of the network is trained.*HINT") as caught:
        train(PrivateModule(network), Digits(), plan_of(scaling=scaling))
    assert "not settled" not in str(caught.value)


@pytest.mark.parametrize("scaling", ["exact", "exact_layerwise"])
def test_a_named_exact_scaling_without_a_norm_has_that_of_auto(scaling: str) -> None:
    """Balls of norm 1, which these scalings do not need, cost the example `transfer` a third of its accuracy."""
    network = {"class_path": "lipdp_lightning.models.ConvNet", "init_args": {"input_shape": [1, 8, 8], "outputs": 10}}
    budget = {"noise_multiplier": 1.0, "delta": 1e-4, "steps": 2, "batch_size": 360}
    content = {
        "model": {"network": network}, "data": {"class_path": "data_modules.Digits"},
        "optimizer": {"class_path": "torch.optim.Adam"}, "trainer": {"accelerator": "cpu", "devices": 1},
    }  # fmt: skip

    def norm(**given: Any) -> Any:
        prepared = prepare(content | {"privacy": budget | given})
        assert prepared.experiment.trainer.strategy.plan == prepared.plan
        return prepared.plan.to_dict()["max_norm"]

    named = {"scaling": scaling, "radius": 1.0}
    assert norm(**named) == norm() == LARGEST_NORMS[0]
    assert norm(**named, max_norm=1.0) == 1.0
    assert norm(**named, max_norm=None) is None
    assert norm(**named, projection="bjorck") == 1.0
    assert norm(scaling="joint") == 1.0
