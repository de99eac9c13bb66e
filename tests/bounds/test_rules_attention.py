"""Attention: its constants are suprema, an ascent reaches them, smaller ones are exceeded, and the rest is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rule_checks import Forward
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lipdp_lightning.audit import attack
from lipdp_lightning.audit.attack import AttackReport
from lipdp_lightning.bounds import CertificationError, Certifier, certify, registry
from lipdp_lightning.bounds.registry import Bound, Constant, Operation, Unbounded, Value
from lipdp_lightning.bounds.rules.attention import attention
from lipdp_lightning.layers import make_private
from lipdp_lightning.models.transformer import Attention
from lipdp_lightning.norms.operators import NormSource

SLACK = 1 + 1e-9
SMALL = (1.5, 0.8, 2.0)  # norms of queries, keys and values
LARGE = (40.0, 40.0, 2.0)  # at which one value can have nearly all of the attention
Shapes = tuple[tuple[int, ...], ...]
SHAPES: dict[str, Shapes] = {
    "one row": ((1, 3), (2, 3), (2, 2)), "rows": ((4, 3), (2, 3), (2, 2)),
    "heads": ((2, 3, 2), (2, 2, 2), (2, 2, 3)), "three keys": ((1, 3), (3, 3), (3, 2)),
}  # fmt: skip
OUTPUT, QUERY, KEY, VALUE = range(4)
RADII = {OUTPUT: LARGE, QUERY: SMALL, KEY: SMALL, VALUE: LARGE}


def bound_of(shapes: Shapes, radii: tuple[float, ...], **options: object) -> tuple[float, ...]:
    """Returns the rule's bounds on the output, and on the gradients of queries, keys and values."""
    q, k, v = (Value(radius, shape) for radius, shape in zip(radii, shapes, strict=True))
    output = (*shapes[0][:-1], shapes[2][-1])
    found = attention(Operation("attention", None, output, NormSource()), q, k, v, **options)  # type: ignore[arg-type]
    assert isinstance(found.lipschitz, tuple)
    return (found.norm, *found.lipschitz)


def spheres(rows: list[Tensor], radii: tuple[float, ...]) -> list[Tensor]:
    """Rows of candidates, each put onto its sphere."""
    return [
        x * (r / x.flatten(1).norm(dim=1)).reshape(-1, *(1,) * (x.dim() - 1)) for x, r in zip(rows, radii, strict=True)
    ]


def worst(shapes: Shapes, claim: int, steps: int = 400, **options: object) -> float:
    """The largest output, or gradient for a cotangent of norm 1, that an ascent from 24 starts finds."""
    generator = torch.Generator().manual_seed(0)
    output = (*shapes[0][:-1], shapes[2][-1])
    free = [torch.randn(24, *s, generator=generator, dtype=torch.float64).requires_grad_() for s in (*shapes, output)]
    optimizer, best = torch.optim.Adam(free, lr=0.05), 0.0
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no second derivative
            q, k, v, d = spheres(free, (*RADII[claim], 1.0))
            out = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
            if claim == OUTPUT:
                reached = out.flatten(1).norm(dim=1)
            else:
                wanted = (q, k, v)[claim - 1]
                (gradient,) = torch.autograd.grad((out * d).sum(), wanted, create_graph=True)
                reached = gradient.flatten(1).norm(dim=1)
            best = max(best, float(reached.detach().max()))
            optimizer.zero_grad()
            (-reached.clamp_min(1e-12).log().sum()).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize("claim", [OUTPUT, QUERY, KEY, VALUE])
@pytest.mark.parametrize("shapes", SHAPES)
def test_an_ascent_comes_close_to_every_bound_and_never_above(shapes: str, claim: int) -> None:
    certified, found = bound_of(SHAPES[shapes], RADII[claim])[claim], worst(SHAPES[shapes], claim)
    print(f"attention, {shapes}, {('output', 'query', 'key', 'value')[claim]}: {found:.4f} of {certified:.4f}")
    # at these norms a third key cannot be kept from its share of the attention
    reached = 0.7 if shapes == "three keys" and claim in (QUERY, KEY) else 0.99
    assert reached * certified <= found <= certified * SLACK


@pytest.mark.parametrize(
    ("claim", "believed"),
    [(QUERY, 0.25), (QUERY, 0.49), (KEY, 0.25), (OUTPUT, 0.9), (VALUE, 0.9)],
    ids=["queries: a slope of 1/4, as sigmoid has", "queries: just less", "keys: a slope of 1/4", "output", "values"],
)
def test_a_smaller_constant_is_exceeded(claim: int, believed: float) -> None:
    """An ascent that reaches the constants refutes the rule if one of them is smaller."""
    stated = bound_of(SHAPES["one row"], RADII[claim])[claim]
    broken = stated * (believed / 0.5 if claim in (QUERY, KEY) else believed)
    assert worst(SHAPES["one row"], claim) > broken * SLACK


def test_rows_that_all_attend_to_one_value_need_the_root_of_their_number() -> None:
    shapes, without = SHAPES["rows"], LARGE[2]  # a convex combination of values, if there were one row
    assert worst(shapes, OUTPUT) > 1.9 * without
    assert bound_of(shapes, LARGE)[OUTPUT] == pytest.approx(2 * without, rel=1e-4)
    assert worst(shapes, VALUE) > 1.9


MASKS = {
    "of keys": torch.tensor([[True, False], [True, True], [False, True], [True, True]]),
    "added": torch.tensor([[0.0, -math.inf], [3.0, -2.0], [-1e4, 1e4], [0.5, 0.5]], dtype=torch.float64),
}


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 3.0}, {"scale": -2.0}, {"scale": 0}, *({"attn_mask": m} for m in MASKS.values())],
)
def test_options_keep_to_their_bounds(options: dict[str, object]) -> None:
    stated = {name: Constant(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    for claim in (OUTPUT, QUERY, KEY, VALUE):
        certified = bound_of(SHAPES["rows"], RADII[claim], **stated)[claim]
        assert worst(SHAPES["rows"], claim, 60, **options) <= certified * SLACK + 1e-9


def test_the_kernels_of_float32_keep_to_the_margin() -> None:
    """The worst inputs of float64, through the fused kernel: one value, or two that share the attention evenly."""
    torch.manual_seed(0)
    for size in (1.0, 30.0):
        q = torch.zeros(1, 64, 8)
        k = torch.zeros(1, 2, 8)
        k[0, :, 0] = torch.tensor([size, -size])
        v = k.clone().requires_grad_()
        q.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        (of_query,) = torch.autograd.grad(out[0, 0, 0], q)
        norm = float(k.norm())
        _, query, _, _ = bound_of(((64, 8), (2, 8), (2, 8)), (0.0, norm, norm), scale=1.0)
        assert 0.999 * query <= float(of_query.norm()) <= query


class Block(nn.Module):
    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.attention, self.head = Attention(6, 2, scale, causal), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x).mean(1))


def attacked(block: Block) -> AttackReport:
    """Attacks the certificate of a block by inputs and weights."""
    return attack(
        make_private(block), (5, 6), 4.0, "cross_entropy", restarts=12, steps=16, weights=True, weight_rounds=2
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_whole_layer_stands_an_attack_on_inputs_and_weights(causal: bool) -> None:
    torch.manual_seed(0)
    report = attacked(Block(causal, 2.0))
    assert not report.violations(), report.worst
    for group in report.groups:
        print(f"{group.name}: the largest gradient found is {group.worst_case:.3f} of its bound")
    assert min(group.worst_case for group in report.groups) > 0.02


@pytest.mark.parametrize(("slot", "factor"), [(0, 0.02), (1, 0.02), (2, 0.3)], ids=["queries", "keys", "values"])
def test_an_attack_finds_a_rule_that_forgets_a_slot(monkeypatch: pytest.MonkeyPatch, slot: int, factor: float) -> None:
    def broken(op: Operation, *args: Value, **kwargs: object) -> Bound:
        found = attention(op, *args, **kwargs)  # type: ignore[arg-type]
        assert isinstance(found.lipschitz, tuple)
        slots = [s * (factor if place == slot else 1.0) for place, s in enumerate(found.lipschitz)]
        return Bound(found.norm, tuple(slots))

    monkeypatch.setitem(registry._RULES, F.scaled_dot_product_attention, broken)
    torch.manual_seed(0)
    report = attacked(Block(scale=2.0))
    assert report.violations()


def _four_heads(x: Tensor) -> Tensor:
    return x[:, None].repeat(1, 4, 1, 1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0]), "not all positions of the example"),
        (lambda m, x: F.scaled_dot_product_attention(m.scale.float().reshape(1, 1, 4), x, x), "not all positions"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "dropout has no rule"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=x), "its mask is not a constant"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, m.mask.reshape(4, 1, 1)), "not a constant|fails on"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, m.mask.reshape(4, 1)), "a query without a key"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, m.scale.float() / 0), "leaves a query without a key"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, scale=float("nan")), "public, finite"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=-3.0), "-inf by the scale"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.0), "-inf by the scale"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1e-50), "-inf by the scale"),
        (lambda m, x: F.scaled_dot_product_attention(_four_heads(x), x[:, None], x[:, None]), "broadcasts over heads"),
    ],
    ids=["positions of the batch", "a constant", "dropout", "a mask of the input", "a mask for each example",
         "a row without keys", "infinite logits", "no scale", "causal and negative",
         "causal and zero", "causal and zero in float32", "heads"],
)  # fmt: skip
def test_what_has_no_rule_is_refused(function: object, reason: str) -> None:
    with pytest.raises(CertificationError, match=reason):
        certify(Forward(function).double(), (4, 4), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["(4,)", "(4, 4)", "(1, 4, 4)"])
def test_a_network_with_a_constant_mask_is_certified_and_its_buffer_is_read_in_every_step(mask: str) -> None:
    shape = tuple(int(n) for n in mask.strip("(),").split(","))
    model = Forward(lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.mask.expand(shape))).double()
    certifier = Certifier(model, (4, 4), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    certifier.certify()
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    assert torch.equal(certifier.run(x), model(x))
    model.mask.zero_()
    with pytest.raises(CertificationError, match="a query without a key"):
        certifier.certify()


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3), (2, 2)), ((2, 3), (2, 2), (2, 2))], ids=["keys", "features"])
def test_operands_that_do_not_fit_are_refused_since_the_kernel_does_not_look(shapes: Shapes) -> None:
    """The fused kernel of a CPU reads memory behind a key or value that is missing, and may end the process."""
    with pytest.raises(Unbounded, match="do not fit"):
        bound_of(shapes, SMALL)


def test_bfloat16_is_refused() -> None:
    with pytest.raises(CertificationError, match="no margin for bfloat16"):
        certify(make_private(Block()), (5, 6), 1.0, "cross_entropy", compute_dtype=torch.bfloat16)
