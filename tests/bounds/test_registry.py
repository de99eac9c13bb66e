"""The table of rules: a user's own, what a subclass inherits, and the operations refused by name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, starts
from torch import nn

from lipdp_lightning.bounds import Bound, CertificationError, ParameterUse, certify, rule
from lipdp_lightning.bounds.registry import Refusal, module_rule, refuse, registered
from lipdp_lightning.layers import (
    BoundedInput,
    CotangentClip,
    GroupNorm,
    GroupSort,
    Householder,
    InstanceNorm,
    KeyedDropout,
    LayerNorm,
    MaxMin,
    ScaledConv1d,
    ScaledConv2d,
    ScaledL2Pool2d,
    ScaledLinear,
    TemperedSigmoid,
)


class Shift(nn.Module):
    """tanh(x + shift), with a trained shift."""

    def __init__(self, size):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return torch.tanh(x + self.shift)


@rule(Shift)
def shift_rule(op, x):
    return Bound(math.sqrt(x.numel), 1.0, (ParameterUse((op.module.shift,), 1.0),))


class Forgetful(Shift):
    """Registered with a rule that leaves its trained parameter out."""


@rule(Forgetful)
def forgetful_rule(op, x):
    return Bound(math.sqrt(x.numel), 1.0)


def test_a_users_own_rule_works_end_to_end():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Shift(3), nn.Linear(3, 2)).double()
    certificate = certify(model, (4,), 1.0, "cross_entropy", compute_dtype=torch.float64)
    group = certificate.group("1")
    assert group.parameters == ("1.shift",)
    assert not group.uses[0].scalable
    assert certificate.node("_1").forward == pytest.approx(math.sqrt(3))
    for x in starts((4,), 1.0, 60):
        for label in range(2):
            model.zero_grad()
            F.cross_entropy(model(x[None]), torch.tensor([label])).backward()
            for bound in certificate.groups:
                parameters = [model.get_parameter(p) for p in bound.parameters]
                assert math.hypot(*(float(p.grad.norm()) for p in parameters)) <= bound.worst_case * SLACK


@pytest.mark.parametrize("loss", ["cross_entropy", "huber"])
def test_a_rule_that_forgets_a_trained_parameter_is_refused(loss):
    model = nn.Sequential(nn.Linear(4, 3), Forgetful(3), nn.Linear(3, 2))
    with pytest.raises(CertificationError, match="trained parameter"):
        certify(model, (4,), 1.0, loss)
    model[1].requires_grad_(False)
    assert [g.name for g in certify(model, (4,), 1.0, loss).groups] == ["0", "2"]


def test_a_rule_for_one_slot_is_no_rule_for_two():
    class Blend(nn.Module):
        def forward(self, x, y):
            return x + y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blend = Blend()

        def forward(self, x):
            return self.blend(x, 2 * x)

    certify(Model(), (3,), 1.0, "cross_entropy")  # without a rule it is walked through

    @rule(Blend)
    def one_slot(op, x, y):
        return Bound(x.norm + y.norm, 1.0)

    with pytest.raises(CertificationError, match="answers for 1 argument slots, and 2 hold activations"):
        certify(Model(), (3,), 1.0, "cross_entropy")


def test_a_second_rule_for_one_operation_is_refused():
    with pytest.raises(ValueError, match="has a rule already") as caught:
        rule(nn.ReLU)(lambda op, x: Bound(0.0, 0.0))
    assert "HINT" in str(caught.value)


def test_subclasses_with_a_rule_win_and_plain_subclasses_inherit():
    class Plain(Shift):
        def extra_repr(self):
            return "plain"

    assert module_rule(Shift) is shift_rule
    assert module_rule(Plain) is shift_rule
    assert module_rule(Forgetful) is forgetful_rule
    assert module_rule(MaxMin) is module_rule(GroupSort)
    assert module_rule(nn.ZeroPad2d) is module_rule(nn.ConstantPad2d)


class Amplified(nn.Linear):
    def forward(self, input):
        return 100 * super().forward(input)


class Doctored(nn.Linear):
    @property
    def weight(self):
        return 100 * self._parameters["weight"]

    @weight.setter
    def weight(self, value):
        self._parameters["weight"] = value


class Redrawn(nn.Conv1d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, 100 * weight, bias)


@pytest.mark.parametrize("kind", [Amplified, Doctored, Redrawn])
def test_a_subclass_that_computes_something_else_inherits_no_rule(kind):
    assert module_rule(kind) is None


def test_a_subclass_with_its_own_forward_is_walked_through():
    torch.manual_seed(0)
    model = nn.Sequential(Amplified(4, 3)).double()
    certificate = certify(model, (4,), 1.0, "cross_entropy", compute_dtype=torch.float64)
    out = certificate.node(certificate.output).forward
    plain = certify(nn.Sequential(nn.Linear(4, 3)), (4,), 1.0, "cross_entropy")
    assert max(float(model(x[None]).detach().norm()) for x in starts((4,), 1.0)) > plain.node(plain.output).forward
    assert max(float(model(x[None]).detach().norm()) for x in starts((4,), 1.0)) <= out
    (use,) = certificate.groups[0].uses
    assert use.cotangent_bound == pytest.approx(100 * math.sqrt(2))


@pytest.mark.parametrize(
    "kind",
    [BoundedInput, CotangentClip, GroupNorm, GroupSort, Householder, InstanceNorm, KeyedDropout, LayerNorm, MaxMin,
     ScaledConv1d, ScaledConv2d, ScaledL2Pool2d, ScaledLinear, TemperedSigmoid],
)  # fmt: skip
def test_every_layer_of_the_library_has_a_rule(kind):
    assert callable(module_rule(kind))


REFUSED_MODULES = {
    nn.BatchNorm1d(4): "mixes examples", nn.BatchNorm2d(4): "mixes examples", nn.SyncBatchNorm(4): "mixes examples",
    nn.GroupNorm(2, 4): r"sqrt\(var \+ eps\)", nn.LayerNorm(4): r"sqrt\(var \+ eps\)", nn.InstanceNorm1d(4): "eps",
    nn.LocalResponseNorm(2): "eps", nn.RMSNorm(4): "floor", nn.RReLU(): "row in the batch",
    nn.Embedding(5, 4): "embedding", nn.MultiheadAttention(4, 2): "weights of its own",
    nn.TransformerEncoderLayer(4, 2): "weights of its own", nn.LSTM(4, 4): "recurrent", nn.GRU(4, 4): "recurrent",
    nn.RNN(4, 4): "recurrent", nn.LSTMCell(4, 4): "recurrent",
    nn.ConvTranspose3d(4, 4, 3): "no certified norm",
    nn.Conv3d(4, 4, 3): "no certified norm", nn.Bilinear(4, 4, 4): "no certified norm",
    nn.Dropout1d(): "row in the batch", nn.Dropout2d(): "row in the batch", nn.AlphaDropout(): "row in the batch",
    nn.FeatureAlphaDropout(): "row in the batch", nn.LogSoftmax(1): "classes", nn.GLU(): "product of activations",
}  # fmt: skip


@pytest.mark.parametrize("module", REFUSED_MODULES, ids=lambda m: type(m).__name__)
def test_refused_modules_are_named_with_reason_and_fix(module):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stage = nn.Sequential(nn.Linear(4, 4))
            self.culprit = module

        def forward(self, x):
            return self.culprit(self.stage(x))

    with pytest.raises(CertificationError, match=REFUSED_MODULES[module]) as caught:
        certify(Model(), (4,), 1.0, "cross_entropy")
    (problem,) = [p for p in caught.value.problems if p.path == "culprit"]
    assert type(module).__name__ in problem.reason
    assert problem.hint
    assert f"HINT: {problem.hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.batch_norm(x, None, None, training=True), "mixes examples"),
        (lambda m, x: F.layer_norm(x, (4,)), "eps"),
        (lambda m, x: F.group_norm(x, 2), "eps"),
        (lambda m, x: F.normalize(x, dim=1), "floor"),
        (lambda m, x: F.dropout(x, 0.5), "row in the batch"),
        (lambda m, x: F.alpha_dropout(x, 0.5), "row in the batch"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x), "not all positions"),
        (lambda m, x: F.interpolate(x[:, None], scale_factor=2, mode="area"), "adaptive average"),
        (lambda m, x: F.log_softmax(x, dim=1), "classes"),
        (lambda m, x: F.glu(x), "product of activations"),
        (lambda m, x: torch.einsum("bi,bi->bi", x, x), "product of activations"),
        (lambda m, x: torch.bmm(x[:, None], x[:, :, None]), "product of activations"),
        (lambda m, x: x.sort(1).values, "GroupSort"),
        (lambda m, x: torch.topk(x, 2).values, "GroupSort"),
        (lambda m, x: torch.fft.rfft(x).real, "no rule"),
    ],
)
def test_refused_functions_say_why(function, reason):
    with pytest.raises(CertificationError, match=reason):
        certify(Forward(function).double(), (4,), 1.0, "cross_entropy")


def test_all_problems_are_listed_at_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GLU(), Forward(lambda m, x: x.exp()))
    with pytest.raises(CertificationError) as caught:
        certify(model, (4,), 1.0, "cross_entropy")
    assert [p.path for p in caught.value.problems] == ["1", "2", "3, exp"]
    assert "3 problems" in str(caught.value)


def test_a_subclass_of_a_refused_module_is_refused_until_it_has_a_rule():
    class Harmless(nn.LayerNorm):
        def forward(self, input):
            return input

    assert isinstance(module_rule(Harmless), Refusal)
    rule(Harmless)(lambda op, x: Bound(x.norm, 1.0))
    certify(
        nn.Sequential(Harmless(4, elementwise_affine=False), nn.Linear(4, 2)),
        (4,),
        1.0,
        "cross_entropy",
        compute_dtype=torch.float64,
    )


def test_refusals_and_rules_do_not_overlap_silently():
    before = set(registered())

    class New(nn.Module):
        def forward(self, x):
            return x

    refuse(New, reason="it is new", hint="wait")
    with pytest.raises(CertificationError, match="it is new"):
        certify(New(), (4,), 1.0, "cross_entropy")
    assert set(registered()) == before
