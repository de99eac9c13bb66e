"""Waves, extremes of two, running sums, upsampling, PReLU, reads by public lists, and einsum with a constant."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, largest_output, starts, steepest
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.bounds.rules import activations, pooling

VECTOR, IMAGE = (4,), (2, 5, 4)
INDEX = torch.tensor([3, 0, 3, 3])
TABLE = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3).cos()

# name: (shape of an example, function of (module, x), its constant); linear maps, so one Jacobian tells all
LINEAR = {
    "select": (IMAGE, lambda m, x: x.select(2, -1), 1.0),
    "torch.select": (IMAGE, lambda m, x: torch.select(x, 1, 0), 1.0),
    "narrow": (IMAGE, lambda m, x: x.narrow(3, 1, 2), 1.0),
    "torch.narrow": (IMAGE, lambda m, x: torch.narrow(x, dim=2, start=0, length=4), 1.0),
    "list": (VECTOR, lambda m, x: x[:, [0, 2, 1]], 1.0),
    "list with copies": (VECTOR, lambda m, x: x[:, [0, 0, 1, -4]], math.sqrt(3)),
    "tensor": (VECTOR, lambda m, x: x[:, INDEX], math.sqrt(3)),
    "two lists": (IMAGE, lambda m, x: x[:, :, [0, 0, 1], [2, 2, 2]], math.sqrt(2)),
    "grid": (IMAGE, lambda m, x: x[..., [[0, 1], [1, 1]]], math.sqrt(3)),
    "slice and list": (IMAGE, lambda m, x: x[:, :, 1:3, [0, 0]], math.sqrt(2)),
    "index_select": (VECTOR, lambda m, x: x.index_select(1, INDEX), math.sqrt(3)),
    "torch.index_select": (VECTOR, lambda m, x: torch.index_select(x, -1, INDEX), math.sqrt(3)),
    "cumsum": (VECTOR, lambda m, x: x.cumsum(1), 1 / (2 * math.sin(math.pi / 18))),
    "cumsum rows": (IMAGE, lambda m, x: torch.cumsum(x, dim=2), 1 / (2 * math.sin(math.pi / 22))),
    "einsum": (VECTOR, lambda m, x: torch.einsum("bi,ij->bj", x, m.table), None),
    "einsum second": (IMAGE, lambda m, x: torch.einsum("wo, bchw -> bcho", m.table, x), None),
    "einsum gate": (VECTOR, lambda m, x: torch.einsum("bi,i->bi", x, m.frozen), None),
    "einsum outer": (VECTOR, lambda m, x: torch.einsum("bi,wo->bowi", x, m.table), None),
    "einsum diagonal": ((3, 3), lambda m, x: torch.einsum("bii->bi", x), 1.0),
    "einsum trace": ((3, 3), lambda m, x: torch.einsum("bii->b", x), math.sqrt(3)),
    "einsum permute": (IMAGE, lambda m, x: torch.einsum("bchw->bwch", x), 1.0),
    "einsum mean": (IMAGE, lambda m, x: torch.einsum("bchw->bc", x), math.sqrt(20)),
}  # fmt: skip
LINEAR |= {
    f"{mode} {size} {corners}": (
        (2, 5, 4),
        lambda m, x, o={"size": size, "mode": mode, "align_corners": corners}: F.interpolate(x, **o),
        None,
    )
    for mode, corners in (("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True))
    for size in (7, (10, 8), (3, 9), (1, 1))
}
LINEAR |= {
    "nn.Upsample": (IMAGE, nn.Upsample(scale_factor=2), 2.0),
    "nn.Upsample linear": ((3, 6), nn.Upsample(scale_factor=1.7, mode="linear"), None),
    "scales": (IMAGE, lambda m, x: F.interpolate(x, scale_factor=(1.3, 2.9)), None),
    "scales bilinear": (IMAGE, lambda m, x: F.interpolate(x, scale_factor=(1.3, 0.6), mode="bilinear"), None),
    "recomputed": (IMAGE, lambda m, x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=True), None),
    "nn.UpsamplingBilinear2d": (IMAGE, nn.UpsamplingBilinear2d(scale_factor=3), None),
    "nn.UpsamplingNearest2d": (IMAGE, nn.UpsamplingNearest2d(size=(9, 5)), None),
    "size of another": (IMAGE, lambda m, x: F.interpolate(x[:, :, ::2, ::2], size=x.shape[2:]), None),
}


def model_of(entry):
    model = entry if isinstance(entry, nn.Module) else Forward(entry)
    model.table = nn.Parameter(TABLE, requires_grad=False)
    return model


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_attain_their_constant(name):
    """Every smaller constant is exceeded by the Jacobian, and a constant of its own says what it is."""
    shape, entry, constant = LINEAR[name]
    model = model_of(entry)
    lipschitz, norm = bounds_of(model, shape, 1.5)
    measured = jacobian_norm(model, starts(shape, 1.0)[4])
    slack = 1 + 1e-5 if "linear" in name.lower() else 1 + 2e-9  # for torch's rounding of where a point lies
    assert lipschitz / slack <= measured <= lipschitz * SLACK
    assert constant is None or lipschitz == pytest.approx(constant, rel=2e-9)
    assert largest_output(model, shape, 1.5, steps=20) <= norm * SLACK


@pytest.mark.parametrize(("function", "slope"), [(torch.sin, 1.0), (torch.cos, 1.0), (torch.erf, activations.ERF)])
def test_waves(function, slope):
    model = Forward(lambda m, x: function(x))
    for radius in (0.05, 1.0, 4.0, 40.0):
        lipschitz, norm = bounds_of(model, (5,), radius)
        assert lipschitz == slope
        assert largest_output(model, (5,), radius) <= norm * SLACK
    x = torch.linspace(-4, 4, 8001, dtype=torch.float64).requires_grad_(True)
    (found,) = torch.autograd.grad(function(x).sum(), x)
    assert slope * (1 - 1e-6) <= float(found.abs().max()) <= slope


def test_a_cosine_is_not_bounded_by_its_input():
    assert largest_output(Forward(lambda m, x: x.cos()), (5,), 0.05) > 0.05 * 10
    assert 2 / math.sqrt(math.pi) <= activations.ERF < 2 / math.sqrt(math.pi) * (1 + 1e-6)


@pytest.mark.parametrize("largest", [torch.maximum, torch.minimum])
def test_extremes_of_two_combine_by_root_of_squares(largest):
    """The maximum of x and its reverse takes the larger entry twice: its norm is sqrt(2), and so is its slope."""
    sign = 1.0 if largest is torch.maximum else -1.0
    model = Forward(lambda m, x: largest(x, x.flip(1)))
    lipschitz, norm = bounds_of(model, (2,), 1.5)
    assert (lipschitz, norm) == (pytest.approx(math.sqrt(2)), pytest.approx(1.5 * math.sqrt(2)))
    x = sign * torch.tensor([1.5, 0.0], dtype=torch.float64)
    assert jacobian_norm(model, x) == pytest.approx(lipschitz)
    assert float(model(x[None]).norm()) == pytest.approx(norm)


EXTREMES = {
    "constant": lambda m, x: torch.maximum(x, m.scale), "constant first": lambda m, x: torch.minimum(m.scale, 3 * x),
    "frozen": lambda m, x: x.maximum(m.frozen), "itself": lambda m, x: torch.maximum(x, x),
    "negated": lambda m, x: torch.maximum(x, -x), "scaled": lambda m, x: x.minimum(-3 * x.roll(1, 1)),
    "broadcast": lambda m, x: torch.maximum(x[:, :1], x),
    "table": lambda m, x: torch.maximum(x[:, None], x[:, :, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_of_two_hold(name):
    model = Forward(EXTREMES[name])
    lipschitz, norm = bounds_of(model, VECTOR, 2.0)
    assert 0.5 * lipschitz <= steepest(model, VECTOR, steps=30) <= lipschitz * SLACK
    assert 0.5 * norm <= largest_output(model, VECTOR, 2.0, steps=30) <= norm * SLACK
    assert max(jacobian_norm(model, x) for x in starts(VECTOR, 2.0)) <= lipschitz * SLACK  # ties among them


@pytest.mark.parametrize(("radius", "dim"), [(0.05, 1), (3.0, 1), (3.0, (1, 2)), (50.0, 2)])
def test_log_sum_exp(radius, dim):
    model = Forward(lambda m, x: torch.logsumexp(x, dim))
    lipschitz, norm = bounds_of(model, (3, 4), radius)
    groups, n = {1: (4, 3), 2: (3, 4), (1, 2): (1, 12)}[dim]
    assert (lipschitz, norm) == (1.0, pytest.approx(radius + math.sqrt(groups) * math.log(n)))
    tight = 0.6 if radius == 3.0 else 0.95  # the sum of both terms is nearly attained by small and by large inputs
    assert tight * norm <= largest_output(model, (3, 4), radius) <= norm * SLACK
    spike = torch.zeros(3, 4)
    spike[0, 0] = 100.0
    assert 0.999 <= jacobian_norm(model, spike) <= SLACK


@pytest.mark.parametrize("slopes", [torch.tensor([0.25]), torch.tensor([-2.5]), torch.tensor([0.1, -3.0, 2.0])])
@pytest.mark.parametrize("trained", [False, True])
def test_prelu(slopes, trained):
    model = nn.PReLU(len(slopes)).double()
    model.weight = nn.Parameter(slopes.double(), requires_grad=trained)
    certificate = certify(model, (3, 2), 2.0, "binary_cross_entropy", compute_dtype=torch.float64)
    constant = max(1.0, float(slopes.abs().max()))
    assert bounds_of(model, (3, 2), 2.0) == (pytest.approx(constant), pytest.approx(2.0 * constant))
    points = torch.cat([-starts((3, 2), 2.0), -2 * torch.eye(6, dtype=torch.float64).reshape(6, 3, 2)])
    assert max(jacobian_norm(model, x) for x in points) == pytest.approx(constant, rel=1e-6)
    if trained:
        (use,) = certificate.groups[0].uses
        found = 0.0
        for x in points:
            rows = torch.autograd.functional.jacobian(
                lambda w, x=x: F.prelu(x[None], w).flatten(), model.weight.detach()
            )
            found = max(found, float(torch.linalg.matrix_norm(rows, 2)))
        assert 0.999 * use.gradient_factor <= found <= use.gradient_factor * SLACK == 2.0 * SLACK


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_upsampling_in_float32_keeps_the_norm_of_float64(mode):
    """torch places a point among n in float32; the norm that is certified is computed in float64."""
    for n, size in ((7, 61), (129, 300), (333, 1000), (1000, 1001), (1500, 700)):
        certified, rows, _ = pooling._interpolation(n, size, None, mode, None, None)
        matrix = F.interpolate(torch.eye(n)[:, None], size=size, mode=mode)[:, 0].double()
        measured = float(torch.linalg.matrix_norm(matrix, 2))
        assert rows == size
        assert certified / (1 + n * 2**-20 + 1e-8) <= measured <= certified


def test_a_norm_of_a_large_axis_is_bounded_without_its_matrix(monkeypatch):
    exact, *_ = pooling._interpolation.__wrapped__(30, 47, None, "linear", False, None)
    monkeypatch.setattr(pooling, "LARGEST_MATRIX", 10)
    bounded, *_ = pooling._interpolation.__wrapped__(30, 47, None, "linear", False, None)
    assert exact <= bounded <= 1.2 * exact


REFUSED = {
    "select batch": (lambda m, x: x.select(0, 0)[None] + x, "apart|batch"),
    "narrow batch": (lambda m, x: x.narrow(0, 0, 1) + x, "apart|batch"),
    "selected by example": (lambda m, x: x.index_select(1, x.argmax(1)), "apart|no rule"),
    "list of examples": (lambda m, x: x[[0, 1]], "apart|selects examples"),
    "mask": (lambda m, x: x[:, m.mask], "public integer"),
    "cumsum batch": (lambda m, x: x.cumsum(0), "mixes"),
    "cumsum half": (lambda m, x: x.cumsum(1, dtype=torch.float16), "float16"),
    "logsumexp batch": (lambda m, x: x.logsumexp((0, 1), True) + x, "apart|mixes"),
    "bicubic": (lambda m, x: F.interpolate(x[:, None, None], size=9, mode="bicubic"), "no rule"),
    "area": (lambda m, x: F.interpolate(x[:, None], size=9, mode="area"), "adaptive"),
    "einsum activations": (lambda m, x: torch.einsum("bi,bi->bi", x, x), "product of activations"),
    "einsum batch": (lambda m, x: torch.einsum("bi,bj->bj", x, m.frozen.detach()[None]), "name the"),
    "einsum three": (lambda m, x: torch.einsum("bi,ij,i->bj", x, m.table, m.frozen), "several constants"),
    "einsum sum": (lambda m, x: torch.einsum("bi,ij->bi", x, m.table), "by itself"),
    "einsum short": (lambda m, x: torch.einsum("bi,ij", x, m.table), "in full"),
    "einsum dots": (lambda m, x: torch.einsum("...i,ij->...j", x, m.table), "in full"),
    "prelu of no number": (lambda m, x: F.prelu(x, m.frozen.detach() / 0), "finite"),
    "prelu by example": (lambda m, x: F.prelu(x, x[0]), "apart|product"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_forms_say_why(name):
    function, reason = REFUSED[name]
    with pytest.raises(CertificationError, match=reason) as caught:
        certify(model_of(function).double(), VECTOR, 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    assert all(p.hint for p in caught.value.problems)


@pytest.mark.parametrize(
    "view", [lambda x: x.select(1, 0), lambda x: x.narrow(1, 0, 2), lambda x: torch.select(x, 1, 1)]
)
def test_a_write_on_what_a_selection_shows_is_refused(view):
    def forward(m, x):
        y = 1.0 * x
        view(y).mul_(3.0)
        return y

    with pytest.raises(CertificationError, match="in place"):
        certify(Forward(forward).double(), VECTOR, 1.0, "binary_cross_entropy")


@pytest.mark.parametrize(
    ("function", "reads"),
    [(lambda m, x: x[:, [0] * 64], 64), (lambda m, x: F.interpolate(x[:, None], scale_factor=64), 64)],
)
def test_sums_that_bfloat16_rounds_up_are_covered(function, reads):
    """Each of the additions in a gradient may round up by 2^-8 of the sum."""
    at = {}
    for dtype in (torch.float32, torch.bfloat16):
        certificate = certify(Forward(function), VECTOR, 1.0, "binary_cross_entropy", compute_dtype=dtype)
        at[dtype] = certificate.nodes[0].cotangent / certificate.loss_lipschitz
    assert at[torch.bfloat16] >= at[torch.float32] * (1 + 2**-8) ** (reads - 1)


def test_a_constant_that_bfloat16_rounds_is_covered():
    """Entries that cancel are rounded each by itself, by up to 2^-9 of them, as those of a weight are."""
    table = torch.nn.Parameter(torch.tensor([[1.0, -1.0]] * 3 + [[1.003, -1.003]]), requires_grad=False)
    model = Forward(lambda m, x: torch.einsum("bi,ij->bj", x, m.table))
    model.table = table
    certificate = certify(model, VECTOR, 1.0, "binary_cross_entropy", compute_dtype=torch.bfloat16)
    certified = certificate.nodes[0].cotangent / certificate.loss_lipschitz
    rounding = 2**-8 * float(table.norm())
    assert certified >= float(torch.linalg.matrix_norm(table.double(), 2)) + rounding
