"""The converter: what it keeps, what it changes, what it says, and what an attack finds in its certificates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import MODELS, SHAPE, Block, Gated, SmallMixer, SmallResNet, lived_in
from torch import Tensor, nn

import lipdp_lightning
from lipdp_lightning.audit import attack
from lipdp_lightning.conversion import convert
from lipdp_lightning.conversion.chain import last_modules
from lipdp_lightning.conversion.converter import made_up_inputs
from lipdp_lightning.layers import make_private
from lipdp_lightning.studies.timm_models import train_privately

WAYS: dict[str, dict[str, Any]] = {
    "groups": {},
    "running": {"batch_norm": "running"},
    "limited": {"alpha": 1.0, "max_norm": 1.0},
    "last": {"train": "last"},
    "head": {"train": "last", "blocks": 0},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def rows() -> Tensor:
    return torch.randn(5, *SHAPE)


def test_the_package_exports_it() -> None:
    assert lipdp_lightning.convert is convert


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_an_attack_on_the_certificate_finds_nothing(name: str, way: str) -> None:
    network, report = convert(lived_in(MODELS[name]()), SHAPE, **WAYS[way])
    assert report.certified, str(report)
    found = attack(make_private(network), SHAPE, report.input_bound, "cross_entropy", restarts=12, steps=8)
    assert found.violations() == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_an_example_changes_no_other_output(name: str, way: str) -> None:
    """In training mode, too, where the original's batch normalisation mixes examples."""
    network, _ = convert(lived_in(MODELS[name]()), SHAPE, **WAYS[way])
    x = rows()
    other = torch.cat([1e3 * torch.ones(1, *SHAPE), x[1:]])
    for mode in (True, False):
        network.train(mode)
        with torch.no_grad():
            torch.testing.assert_close(network(x)[1:], network(other)[1:], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(network(x)[2:3], network(x[2:3]), rtol=1e-4, atol=1e-5)


def test_the_original_mixes_examples() -> None:
    model, x = lived_in(SmallResNet()).train(), rows()
    model.drop.p = 0.0
    with torch.no_grad():
        torch.manual_seed(1)
        first = model(x)[1:]
        torch.manual_seed(1)
        assert (model(torch.cat([1e3 * torch.ones(1, *SHAPE), x[1:]]))[1:] - first).norm() > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_left_alone(way: str) -> None:
    model = lived_in(SmallResNet())
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    convert(model, SHAPE, **WAYS[way])
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)
    assert [type(m) for m in model.modules()] == kinds
    assert all(p.requires_grad for p in model.parameters()) and not model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["groups", "running"])
def test_names_and_weights_stay(name: str, way: str) -> None:
    model = lived_in(MODELS[name]())
    network, report = convert(model, SHAPE, **WAYS[way])
    assert {k: v.tolist() for k, v in network.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }
    assert report.renamed == {}
    network.load_state_dict(lived_in(MODELS[name]()).state_dict())


def test_running_statistics_leave_the_outputs_and_follow_a_loaded_state() -> None:
    model, x = lived_in(SmallResNet()), rows()
    network, report = convert(model, SHAPE, batch_norm="running")
    assert report.moved < 1e-5
    torch.testing.assert_close(outputs(network, x), outputs(model, x))
    model.stem[1].running_var.mul_(4.0)
    network.load_state_dict(model.state_dict())
    torch.testing.assert_close(outputs(network, x), outputs(model, x))


def test_a_small_floor_hardly_moves_layer_and_group_normalisation() -> None:
    model, x = lived_in(SmallMixer()), rows()
    moved = [convert(model, SHAPE, alpha=alpha).report.moved for alpha in (1e-3, 10.0)]
    assert moved[0] < 1e-3 and moved[1] > 0.1
    torch.testing.assert_close(
        outputs(convert(model, SHAPE, alpha=1e-3).network, x), outputs(model, x), rtol=1e-2, atol=1e-2
    )


def test_what_moved_is_measured() -> None:
    model = lived_in(SmallResNet())
    network, report = convert(model, SHAPE)
    x = made_up_inputs(model, SHAPE, report.input_bound)
    expected = (outputs(network, x) - outputs(model, x)).norm() / outputs(model, x).norm()
    assert report.moved == pytest.approx(float(expected), rel=1e-4)
    assert float(x.flatten(1).norm(dim=1).max()) <= report.input_bound * (1 + 1e-6)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_last_blocks_are_those_that_are_trained(blocks: int) -> None:
    model, x = lived_in(SmallResNet()), rows()
    network, report = convert(model, SHAPE, train="last", blocks=blocks, batch_norm="running")
    names = {report.renamed[name] for name in report.trained}
    stages = [f"stage.{i}.conv{j}.weight" for i in range(2 - blocks, 2) for j in (1, 2)]
    assert names == {*stages, "fc.weight", "fc.bias"}
    assert report.certified and report.moved < 1e-5
    assert set(report.renamed.values()) == set(model.state_dict())
    torch.testing.assert_close(outputs(network, 0.1 * x), outputs(model, 0.1 * x), rtol=1e-4, atol=1e-4)


def test_a_row_of_modules_ends_where_a_value_is_written_in_place() -> None:
    """The block's last activation reads the tensor that bn2 returned, after the shortcut was added to it."""
    assert last_modules(Block(8), torch.randn(2, 8, 8, 8)) == ("act2",)
    row = last_modules(SmallResNet(), torch.randn(2, *SHAPE))
    assert row == ("stem.0", "stem.1", "stem.2", "stage.0", "stage.1", "drop", "pool", "flat", "fc")


def test_gates_are_refused_and_may_be_frozen() -> None:
    _, report = convert(Gated(), SHAPE)
    assert not report.certified and "product of two activations" in str(report)
    _, report = convert(Gated(), SHAPE, train="last")
    assert report.certified and {report.renamed[n] for n in report.trained} == {"fc.weight", "fc.bias"}


def test_the_report_has_a_line_for_each_module() -> None:
    _, report = convert(SmallResNet(), SHAPE)
    lines = {change.path: change.what for change in report.changes}
    assert set(lines) == {
        "stem.0", "stem.1", "stem.2", "drop", "fc",
        *(f"stage.{i}.{m}" for i in (0, 1) for m in ("conv1", "bn1", "conv2", "bn2")),
    }  # fmt: skip
    assert lines["drop"] == "removed" and lines["fc"] == "kept"
    assert "zero scale set to 1" in lines["stage.0.bn2"] and "zero" not in lines["stage.0.bn1"]
    assert report.as_dict()["changes"][0]["path"] == "stem.0" and "certified" in str(report)


def test_a_subclass_that_computes_something_else_is_not_replaced() -> None:
    class Doubled(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Renamed(nn.LayerNorm):
        pass

    for kind, certified in ((Doubled, False), (Renamed, True)):
        model = SmallMixer()
        model.norm = kind(8)
        assert convert(model, SHAPE).report.certified == certified


def test_a_model_that_is_one_layer_is_converted() -> None:
    network, report = convert(nn.BatchNorm2d(3), SHAPE)
    assert [c.path for c in report.changes] == [""] and not report.certified
    assert network(rows()).shape == (5, *SHAPE) and "nothing in it can be trained" in str(report)


@pytest.mark.parametrize(
    "options, said",
    [({"train": "first"}, "'last'"), ({"alpha": 0.0}, "floor"), ({"batch_norm": "keep"}, "running"),
     ({"blocks": -1}, "negative"), ({"max_norm": -1.0}, "max_norm")],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        convert(SmallMixer(), SHAPE, **options)


def test_a_model_without_a_head_or_a_shape_is_refused() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum((2, 3)) * 2

    with pytest.raises(ValueError, match="HINT: make the model without its classifier"):
        convert(Sum(), SHAPE, train="last")
    with pytest.raises(ValueError, match="HINT: give the shape"):
        convert(Sum())


@pytest.mark.parametrize("way", ["groups", "last"])
def test_a_converted_model_trains_privately(way: str) -> None:
    torch.set_num_threads(1)
    model = SmallResNet()
    model.pool, model.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)
    train_privately(*convert(model, (3, 32, 32), **WAYS[way]))
