"""make_private: the same model in other classes, or every reason why not and the model untouched."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.layers import KeyedDropout, ScaledConv1d, ScaledConv2d, ScaledLinear, make_private


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), nn.Dropout(0.3))
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular") for _ in range(2)])
        self.named = nn.ModuleDict({"pool": nn.AdaptiveAvgPool2d(1), "head": nn.Linear(4, 5)})
        self.alias = self.named["head"]

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return self.alias(self.named["pool"](x).flatten(1))


def test_a_model_keeps_values_parameters_and_keys():
    torch.manual_seed(0)
    model = Network().eval()
    x = torch.randn(2, 3, 6, 6)
    before, keys = model(x), list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    private = make_private(model)
    assert private is model
    torch.testing.assert_close(private(x), before)
    assert list(private.state_dict()) == keys
    assert [id(p) for p in private.parameters()] == parameters
    kinds = [type(m) for m in private.modules()]
    assert kinds.count(ScaledConv2d) == 3
    assert kinds.count(ScaledLinear) == kinds.count(KeyedDropout) == 1
    assert not {nn.Linear, nn.Conv2d, nn.Dropout}.intersection(kinds)
    assert not any(m.training for m in private.modules())


def test_a_reused_layer_stays_one_layer_under_every_name():
    model = Network()
    make_private(model)
    assert model.alias is model.named["head"]
    shared = nn.Linear(4, 4)
    same_parent = make_private(nn.Sequential(shared, nn.ReLU(), shared))
    assert same_parent[0] is same_parent[2]
    assert isinstance(same_parent[0], ScaledLinear)
    nested = make_private(nn.Sequential(shared, nn.Sequential(shared)))
    assert nested[0] is nested[1][0]
    assert len(list(nested.parameters())) == 2


@pytest.mark.parametrize(
    ("layer", "kind", "shape"),
    [(nn.Linear(4, 2), ScaledLinear, (4,)), (nn.Conv1d(2, 3, 2), ScaledConv1d, (2, 5)),
     (nn.Conv2d(2, 3, 2), ScaledConv2d, (2, 5, 5)), (nn.Dropout(0.2), KeyedDropout, (4,))],
)  # fmt: skip
def test_a_single_layer_is_a_model(layer, kind, shape):
    private = make_private(layer)
    assert type(private) is kind
    x = torch.randn(3, *shape)
    torch.testing.assert_close(private.eval()(x), layer.eval()(x))
    assert make_private(private) is private
    certify(private, shape, 1.0, "huber")


def test_conversion_is_idempotent_and_works_on_frozen_layers():
    model = make_private(Network().requires_grad_(False))
    kinds = [type(m) for m in model.modules()]
    assert [type(m) for m in make_private(model).modules()] == kinds
    assert not any(p.requires_grad for p in model.parameters())


def test_hooks_are_kept():
    model = Network().eval()
    calls = []
    model.named["head"].register_forward_hook(lambda module, args, out: calls.append(type(module)))
    model.stem[0].register_full_backward_hook(lambda module, to_input, to_output: calls.append(type(module)))
    make_private(model)
    model(torch.randn(2, 3, 6, 6, requires_grad=True)).sum().backward()
    assert calls == [ScaledLinear, ScaledConv2d]


def test_copies_and_pickles_of_a_private_model():
    torch.manual_seed(0)
    model = make_private(Network()).eval()
    x = torch.randn(2, 3, 6, 6)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x))
        assert twin.alias is twin.named["head"]
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        twin.named["head"].weight.data.zero_()
        assert float(model.named["head"].weight.detach().abs().sum()) > 0
    fresh = Network()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x), model(x))


def test_a_scaler_on_one_layer_leaves_others_alone():
    model = make_private(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].gradient_scaler = lambda norms: torch.zeros_like(norms)
    model(torch.randn(3, 4)).sum().backward()
    assert float(model[0].weight.grad.abs().sum()) == 0 < float(model[1].weight.grad.abs().sum())
    assert model[1].gradient_scaler is None


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).exp())


class Untraceable(Broken):
    def forward(self, x):
        return self.head(self.norm(x)) if x.sum() > 0 else self.stem(x)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [(Broken, {"stem.1", "norm", "forward, exp"}), (Untraceable, {"forward, gt", "stem.1", "norm"})],
)
def test_a_refusal_lists_everything_and_changes_nothing(kind, paths):
    model = kind()
    before = [(name, id(module), type(module)) for name, module in model.named_modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    with pytest.raises(CertificationError) as caught:
        make_private(model)
    assert {p.path for p in caught.value.problems} == paths
    for problem in caught.value.problems:
        assert problem.reason
        assert problem.hint
        assert f"{problem.path}: {problem.reason}. HINT: {problem.hint}." in str(caught.value)
    assert [(name, id(module), type(module)) for name, module in model.named_modules()] == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.training
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())


def test_dropouts_that_cannot_be_keyed_are_refused():
    class Mine(nn.Dropout):
        pass

    for layer in (nn.Dropout2d(0.5), nn.AlphaDropout(0.5), Mine(0.5)):
        with pytest.raises(CertificationError, match="row in the batch"):
            make_private(nn.Sequential(nn.Linear(4, 4), layer))


def test_a_subclass_of_linear_is_left_to_its_own_forward():
    class Halved(nn.Linear):
        def forward(self, input):
            return super().forward(input) / 2

    model = make_private(nn.Sequential(Halved(4, 3)))
    assert type(model[0]) is Halved
    (use,) = certify(model, (4,), 1.0, "cross_entropy").groups[0].uses
    assert not use.scalable


def test_a_layer_outside_the_modules_is_refused():
    """A plain list hides it: it would be trained without noise, or keep its old class."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

        def forward(self, x):
            return self.layers[0](x)

    with pytest.raises(CertificationError):
        make_private(Hidden())
