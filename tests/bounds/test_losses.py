"""Lipschitz constants of the losses: attained by adversarial logits, never exceeded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit.starts import target_source
from lipdp_lightning.bounds import CertificationError, certify
from lipdp_lightning.bounds.losses import (
    LOSSES,
    AbsoluteError,
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Huber,
    Loss,
    MulticlassHinge,
    SaturatingCrossEntropy,
    SmoothL1,
    SoftCrossEntropy,
    SquaredError,
    as_loss,
)

ATTAINED = [
    (CrossEntropy(), (2,)),
    (CrossEntropy(), (10,)),
    (CrossEntropy(temperature=0.25), (5,)),
    (CrossEntropy(temperature=3.0), (4, 6)),
    (CrossEntropy(class_weights=(0.5, 3.0, 1.0)), (3,)),
    (CrossEntropy(class_weights=(0.5, 3.0, 1.0)), (3, 2, 2)),
    (CrossEntropy(label_smoothing=0.001), (4,)),
    (BinaryCrossEntropy(), ()),
    (BinaryCrossEntropy(), (1,)),
    (BinaryCrossEntropy(temperature=0.5), (7,)),
    (BinaryCrossEntropy(), (3, 4)),
    (BinaryCrossEntropy(slope=0.2), ()),
    (BinaryCrossEntropy(slope=0.3, temperature=0.5, pos_weight=(5.0, 0.5, 2.0)), (3,)),
    (BinaryCrossEntropy(pos_weight=(4.0,)), ()),
    (BinaryCrossEntropy(pos_weight=(0.25,)), (1,)),
    (BinaryCrossEntropy(pos_weight=(3.0,), temperature=0.5), (2, 3)),
    (BinaryCrossEntropy(pos_weight=(5.0, 0.5, 2.0)), (3,)),
    (BinaryCrossEntropy(pos_weight=(5.0, 0.5, 2.0)), (2, 3)),
    (MulticlassHinge(), (2,)),
    (MulticlassHinge(margin=0.3), (10,)),
    (MulticlassHinge(), (4, 5)),
    (CosineSimilarity(), (3,)),
    (CosineSimilarity(min_norm=0.2), (5,)),
    (Huber(), (1,)),
    (Huber(delta=0.3), (6,)),
    (Huber(delta=2.0), (2, 3)),
    (AbsoluteError(), (1,)),
    (AbsoluteError(), ()),
    (AbsoluteError(), (2, 3)),
    (SmoothL1(), (1,)),
    (SmoothL1(beta=0.1), (6,)),
    (SmoothL1(beta=50.0), (2, 3)),
    (SoftCrossEntropy(), (2,)),
    (SoftCrossEntropy(temperature=0.25), (5,)),
    (SoftCrossEntropy(temperature=3.0), (4, 6)),
    (CrossEntropy(ignore_index=1), (4, 6)),
    (SquaredError(output_bound=2.0, target_bound=0.5), (1,)),
    (SquaredError(output_bound=1.0, target_bound=3.0), (4,)),
]
BOUNDED = [
    *ATTAINED,
    (CrossEntropy(label_smoothing=0.3), (5,)),
    (CrossEntropy(label_smoothing=1.0, temperature=0.7, class_weights=(1.0, 2.0)), (2, 3)),
    (CosineSimilarity(min_norm=0.5), (3, 4)),
]


def gradient_norms(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.per_example(logits, target).sum(), logits)
    return torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1)


def largest_gradient(loss: Loss, shape: tuple[int, ...]) -> float:
    """Over logits of all sizes, and over logits made to be wrong at every position."""
    generator = torch.Generator().manual_seed(0)
    count = 4000
    target = target_source(loss, shape)(count, generator)
    logits = torch.randn((count, *shape), dtype=torch.float64, generator=generator)
    logits *= torch.logspace(-3, 3, count, dtype=torch.float64).reshape(-1, *(1,) * len(shape))
    found = [gradient_norms(loss, logits, target)]
    for size in (0.0, 0.01, 0.4999, 1.0, 100.0):
        for wrong in wrong_logits(loss, shape, target):
            found.append(gradient_norms(loss, size * wrong, target))
    return float(torch.cat(found).max())


def wrong_logits(loss: Loss, shape: tuple[int, ...], target: Tensor) -> list[Tensor]:
    if isinstance(loss, CrossEntropy | MulticlassHinge | CosineSimilarity):
        hot = F.one_hot(target, shape[0]).movedim(-1, 1).double()
        return [-hot, hot.roll(1, 1) - hot]
    if isinstance(loss, SoftCrossEntropy):
        return [-target, target.roll(1, 1) - target]
    return [-(target.double() - 0.5).sign()]


@pytest.mark.parametrize(("loss", "shape"), BOUNDED, ids=str)
def test_the_gradient_never_exceeds_the_constant(loss: Loss, shape: tuple[int, ...]) -> None:
    assert largest_gradient(loss, shape) <= loss.lipschitz(shape) * (1 + 1e-12)


@pytest.mark.parametrize(("loss", "shape"), ATTAINED, ids=str)
def test_the_constant_is_attained(loss: Loss, shape: tuple[int, ...]) -> None:
    assert largest_gradient(loss, shape) >= 0.99 * loss.lipschitz(shape)


@pytest.mark.parametrize(
    ("loss", "shape", "claimed"),
    [
        (CrossEntropy(), (2,), 1.0),  # the norm of one entry alone
        (CrossEntropy(temperature=0.5), (4,), math.sqrt(2)),  # temperature forgotten
        (CrossEntropy(), (4, 6), math.sqrt(2)),  # positions forgotten
        (CrossEntropy(class_weights=(0.5, 3.0, 1.0)), (3,), math.sqrt(2)),  # class weights forgotten
        (BinaryCrossEntropy(), (7,), 1.0),  # outputs forgotten
        (MulticlassHinge(), (4, 5), 1.0),
        (Huber(delta=0.3), (6,), 0.3),
        (AbsoluteError(), (6,), 1.0),  # outputs forgotten
        (SmoothL1(beta=0.1), (6,), 0.1 * math.sqrt(6)),  # taken for Huber
        (SmoothL1(beta=9.0), (6,), math.sqrt(6) / 9),
        (SoftCrossEntropy(temperature=0.5), (4,), math.sqrt(2)),  # temperature forgotten
        (SoftCrossEntropy(), (4, 6), math.sqrt(2)),  # positions forgotten
        (CosineSimilarity(min_norm=0.2), (5,), 1.0),  # the clamp taken for 1
    ],
    ids=str,
)
def test_a_constant_that_forgets_a_factor_is_exceeded(loss: Loss, shape: tuple[int, ...], claimed: float) -> None:
    assert largest_gradient(loss, shape) > claimed * 1.05


def test_the_hinge_of_the_first_paper_is_not_divided_by_the_classes() -> None:
    """Undivided, its constant is sqrt(c (c - 1)), which thesis 2.5 divides by c to come below 1."""
    classes = 6
    logits = torch.zeros((1, classes), dtype=torch.float64, requires_grad=True)
    undivided = classes * MulticlassHinge().per_example(logits, torch.tensor([0])).sum()
    (gradient,) = torch.autograd.grad(undivided, logits)
    assert float(gradient.norm()) == pytest.approx(math.sqrt(classes * (classes - 1)))
    assert MulticlassHinge().lipschitz((classes,)) == pytest.approx(math.sqrt(5 / 6))


def test_cosine_similarity_without_its_clamp_has_no_constant() -> None:
    logits = torch.tensor([[1e-6, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(1 - F.cosine_similarity(logits, torch.tensor([[0.0, 1.0, 0.0]]))[0], logits)
    assert float(gradient.norm()) > 1e3
    assert float(gradient_norms(CosineSimilarity(), logits, torch.tensor([1]))) <= 1.0


@pytest.mark.parametrize(("loss", "shape"), [p for p in BOUNDED if p[1]], ids=str)
def test_an_example_has_a_loss_of_its_own(loss: Loss, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((5, *shape), dtype=torch.float64, generator=generator)
    target = target_source(loss, shape)(5, generator)
    together = loss.per_example(logits, target)
    assert together.shape == (5,)
    alone = torch.cat([loss.per_example(a, b) for a, b in zip(logits.split(1), target.split(1), strict=True)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), Huber(), SquaredError(), AbsoluteError(), SmoothL1(),
                                  SoftCrossEntropy()], ids=str)  # fmt: skip
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_target_that_is_no_number_moves_the_gradient_no_further(loss: Loss, bad: float) -> None:
    logits = torch.randn((3, 4), generator=torch.Generator().manual_seed(0))
    norms = gradient_norms(loss, logits, torch.full((3, 4), bad))
    assert bool((norms <= loss.lipschitz((4,)) * (1 + 1e-5)).all())


def test_floating_point_targets_of_cross_entropy_are_refused() -> None:
    """Class probabilities that leave the simplex exceed the constant: nothing checks private targets."""
    logits = torch.zeros((1, 3), requires_grad=True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([[9.0, 0.0, 0.0]])), logits)
    assert float(gradient.norm()) > math.sqrt(2)
    with pytest.raises(ValueError, match="floating-point targets"):
        CrossEntropy().per_example(logits, torch.tensor([[9.0, 0.0, 0.0]]))


@pytest.mark.parametrize("seed", range(3))
def test_soft_labels_outside_the_simplex_move_the_gradient_no_further(seed: int) -> None:
    """As they are, they exceed the constant; inside the simplex, the loss is torch's."""
    generator = torch.Generator().manual_seed(seed)
    logits = 20 * torch.randn((500, 4), generator=generator, dtype=torch.float64).requires_grad_()
    wild = torch.randn((500, 4), generator=generator, dtype=torch.float64).exp() ** 3
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, wild, reduction="sum"), logits)
    assert float(plain.norm(dim=1).max()) > 2 * math.sqrt(2)
    for target in (wild, -wild, wild * 1e-3, wild.roll(1, 1) - wild):
        assert float(gradient_norms(SoftCrossEntropy(), logits, target).max()) <= math.sqrt(2)
    inside = wild / wild.sum(1, keepdim=True)
    ours = SoftCrossEntropy(temperature=2.0).per_example(logits, inside)
    torch.testing.assert_close(ours, F.cross_entropy(logits / 2, inside, reduction="none"))


def test_soft_labels_need_one_number_for_each_class() -> None:
    with pytest.raises(ValueError, match=r"another shape.*HINT"):
        SoftCrossEntropy().per_example(torch.zeros(3, 4), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("ignored", [-100, 255, 1])
@pytest.mark.parametrize("kind", [CrossEntropy, SaturatingCrossEntropy])
def test_ignored_labels_add_nothing_and_raise_nothing(kind: type[CrossEntropy], ignored: int) -> None:
    """Class weights are looked up by label, and no label is looked up that is ignored."""
    loss = kind(class_weights=(1.0, 3.0, 2.0), ignore_index=ignored)
    logits = torch.randn((4, 3, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([[0, 2], [ignored, 2], [2, ignored], [ignored, ignored]])
    logits.requires_grad_()
    found = loss.per_example(logits, target)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert bool((gradient.norm(dim=1) == 0).eq(target == ignored).all())
    alone = loss.per_example(logits[1:3].gather(2, torch.tensor([[[1]] * 3, [[0]] * 3])), torch.tensor([[2], [2]]))
    torch.testing.assert_close(found[1:], torch.cat([alone, torch.zeros(1, dtype=torch.float64)]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CrossEntropy(temperature=0.0),
        lambda: CrossEntropy(temperature=math.inf),
        lambda: CrossEntropy(label_smoothing=1.5),
        lambda: CrossEntropy(class_weights=(1.0, -1.0)),
        lambda: CrossEntropy(class_weights=(1.0, math.nan)),
        lambda: BinaryCrossEntropy(temperature=-1.0),
        lambda: BinaryCrossEntropy(slope=0.0),
        lambda: BinaryCrossEntropy(slope=1.1),
        lambda: MulticlassHinge(margin=0.0),
        lambda: CosineSimilarity(min_norm=0.0),
        lambda: Huber(delta=math.inf),
        lambda: SmoothL1(beta=0.0),
        lambda: SoftCrossEntropy(temperature=-1.0),
        lambda: SquaredError(output_bound=0.0),
        lambda: SquaredError(target_bound=math.inf),
    ],
)
def test_parameters_without_a_constant_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="HINT"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("torch_loss", "target"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(reduction="none", label_smoothing=0.2), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(reduction="sum", weight=torch.tensor([1.0, 2.0, 0.5])), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(reduction="sum", ignore_index=2), torch.tensor([0, 2, 1])),
        (nn.CrossEntropyLoss(reduction="sum", weight=torch.tensor([1.0, 2.0, 0.5])), torch.tensor([0, -100, 1])),
        (nn.MultiMarginLoss(reduction="sum", margin=0.4), torch.tensor([0, 2, 1])),
        (nn.L1Loss(reduction="sum"), torch.randn((3, 3), generator=torch.Generator().manual_seed(2))),
        (nn.SmoothL1Loss(reduction="none", beta=0.4), torch.randn((3, 3), generator=torch.Generator().manual_seed(2))),
        (nn.SmoothL1Loss(reduction="sum", beta=0.0), torch.randn((3, 3), generator=torch.Generator().manual_seed(2))),
        (nn.BCEWithLogitsLoss(reduction="sum"), torch.tensor([[0.0, 1.0, 1.0]] * 3)),
        (nn.BCEWithLogitsLoss(reduction="sum", pos_weight=torch.tensor([9.0, 0.5, 2.0])), torch.ones(3, 3)),
        (nn.HuberLoss(reduction="sum", delta=0.4), torch.randn((3, 3), generator=torch.Generator().manual_seed(2))),
    ],
    ids=str,
)
def test_torch_losses_keep_their_value(torch_loss: nn.Module, target: Tensor) -> None:
    logits = torch.randn((3, 3), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(as_loss(torch_loss).per_example(logits, target).sum(), torch_loss(logits, target).sum())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.CrossEntropyLoss(), "mean over the batch"),
        (nn.BCEWithLogitsLoss(), "mean over the batch"),
        (nn.HuberLoss(), "mean over the batch"),
        (nn.MSELoss(reduction="sum"), "no Lipschitz constant"),
        (nn.SmoothL1Loss(), "mean over the batch"),
        (nn.MultiMarginLoss(reduction="sum", p=2), "no known Lipschitz constant"),
        (nn.KLDivLoss(reduction="sum"), "no known Lipschitz constant"),
        (nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1, weight=torch.ones(3)), "label_smoothing"),
        (nn.BCEWithLogitsLoss(reduction="sum", weight=torch.tensor([9.0])), "no known Lipschitz constant"),
        (nn.Linear(1, 1), "no known Lipschitz constant"),
        ("mse", "unknown"),
        pytest.param(F.cross_entropy, "no known Lipschitz constant", id="function"),
    ],
    ids=str,
)
def test_losses_without_a_bound_are_refused_with_the_fix(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        as_loss(given)  # type: ignore[arg-type]
    assert "HINT" in str(refused.value)


def test_every_name_is_a_loss() -> None:
    for name, kind in LOSSES.items():
        assert type(as_loss(name)) is kind


@pytest.mark.parametrize("loss", ["cross_entropy", "hinge", "cosine"])
def test_a_model_without_a_class_dimension_is_refused(loss: str) -> None:
    """Logits of shape (batch,) would be read as one example whose classes are the rows of the batch."""

    class OneNumber(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, 0]

    with pytest.raises(CertificationError, match="one number for each example"):
        certify(OneNumber(), (4,), 1.0, loss)
    assert certify(OneNumber(), (4,), 1.0, "binary_cross_entropy").loss_lipschitz == pytest.approx(1.0, rel=1e-5)
