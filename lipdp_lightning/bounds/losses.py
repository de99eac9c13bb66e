"""Per-example losses with their Lipschitz constants in the logits (guarantee page, table of losses).

A loss maps logits of shape (batch, outputs, positions...) and targets to one number per example, summed over positions:
P positions multiply the constant by sqrt(P). Class weights multiply it, too. No loss averages over the
batch, since the mean over a random sample is not a sum of per-example terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The base class of certified losses.

    A subclass defines ``per_example``, which maps logits and targets to one number per example, and ``lipschitz``,
    which returns its Lipschitz constant for logits of one example's shape. ``task`` names the kind of targets
    (classification, binary or regression) or is None.
    """

    task: ClassVar[str | None] = None

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        raise NotImplementedError


def _positions(shape: tuple[int, ...]) -> int:
    """Returns the number of positions; without a class dimension, torch would take the batch's rows for classes."""
    if not shape:
        raise ValueError(
            "the model returns one number for each example, and the loss needs one logit for each class. "
            "HINT: return logits of shape (batch, classes)."
        )
    return math.prod(shape[1:])


def _public_weights(weights: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    return None if weights is None else torch.tensor(weights, dtype=like.dtype, device=like.device)


def _of_examples(losses: Tensor) -> Tensor:
    """Returns one number for each example: the sum over positions."""
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def _goal(target: Tensor, logits: Tensor) -> Tensor:
    """Returns the targets as finite numbers beside the logits."""
    return torch.nan_to_num(target.to(logits.dtype)).reshape(logits.shape)


def _saturating(margin: Tensor, slope: float) -> Tensor:
    """Returns softplus of the margin, continued by its tangent from where its derivative has reached ``slope``."""
    knee = math.log(slope / (1 - slope))
    # each term reads clamped arguments, so neither overflows
    return F.softplus(margin.clamp_max(knee)) + slope * (margin - knee).clamp_min(0)


def _check_labels(target: Tensor) -> None:
    if target.is_floating_point():
        raise ValueError(
            "cross-entropy was given floating-point targets; nothing keeps them in the simplex, where the "
            "bound holds. HINT: give integer class labels."
        )


def _check_positive(reason: str = "", *, hint: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"{name}={value} is not positive{reason}. HINT: {hint}")


def _check_weights(weights: tuple[float, ...] | None, name: str = "class_weights") -> None:
    if weights is not None and not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ValueError(f"{name}={weights} are not finite and non-negative. HINT: declare public weights.")


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy of logits / temperature.

    The Lipschitz constant is sqrt(2) / temperature times the largest class weight: the gradient in the logits is
    (p - t) / temperature with p and t in the simplex, two points of which are at most sqrt(2) apart. Label smoothing
    moves t within the simplex. A label equal to ``ignore_index`` adds neither loss nor gradient.
    """

    task = "classification"
    temperature: float = 1.0
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int = -100

    def __post_init__(self) -> None:
        _check_positive(temperature=self.temperature, hint="1.0 is the plain loss.")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} is outside [0, 1]. HINT: try 0.1.")
        _check_weights(self.class_weights)

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        _check_labels(target)
        losses = self._of_labels(logits if self.temperature == 1.0 else logits / self.temperature, target)
        weights = _public_weights(self.class_weights, losses)
        if weights is not None:  # of the whole loss, while torch's own weights enter the smoothing, too
            losses = losses * weights[self._known(target)]
        return _of_examples(losses)

    def _known(self, target: Tensor) -> Tensor:
        """Returns the labels with class 0 for an ignored one, whose loss is zero, so that every label names a class."""
        return target.where(target != self.ignore_index, 0)

    def _of_labels(self, scaled: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each label, without weights; that of an ignored label is zero."""
        smoothing, ignored = self.label_smoothing, self.ignore_index
        return F.cross_entropy(scaled, target, reduction="none", label_smoothing=smoothing, ignore_index=ignored)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(2.0) / self.temperature * max(self.class_weights or (1.0,)) * math.sqrt(_positions(shape))


@dataclass(frozen=True)
class SoftCrossEntropy(Loss):
    """Softmax cross-entropy of logits / temperature with class probabilities t as targets.

    The Lipschitz constant is sqrt(2) / temperature. The gradient in the logits is (s p - t) / temperature with
    s = sum(t). Targets are clamped to [0, 1] and divided by their sum where it exceeds 1, so that s p and t both have
    non-negative entries of sum s <= 1, and are at most s sqrt(2) apart. A target of zeros adds no loss.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(temperature=self.temperature, hint="1.0 is the plain loss.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        if target.shape != logits.shape:
            raise ValueError(
                "soft cross-entropy was given targets of another shape than the logits. "
                "HINT: give one probability for each class; 'cross_entropy' takes integer class labels."
            )
        shares = _goal(target, logits).clamp(0, 1)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1)
        return _of_examples(-(shares * F.log_softmax(logits / self.temperature, dim=1)).sum(1))

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(2.0) / self.temperature * math.sqrt(_positions(shape))


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy with logits / temperature, summed over m outputs.

    The Lipschitz constant is sqrt(m) / temperature: each output's derivative p - y lies in [-1, 1], since targets are
    clamped to [0, 1]. Public weights ``pos_weight`` w of positive targets, one or one for each entry of the last axis,
    make this [-w, 1], and m becomes the sum of max(1, w)^2. A ``slope`` below 1 multiplies the constant: the loss is
    then continued by its tangents from where p or 1 - p has reached the slope, as in ``SaturatingCrossEntropy``.
    """

    task = "binary"
    temperature: float = 1.0
    pos_weight: tuple[float, ...] | None = None
    slope: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(temperature=self.temperature, hint="1.0 is the plain loss.")
        _check_weights(self.pos_weight, "pos_weight")
        if not 0 < self.slope <= 1:
            raise ValueError(f"slope={self.slope} is outside (0, 1]. HINT: use 0.15, or 1.0, which is the plain loss.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        goal = torch.nan_to_num(target.to(logits.dtype)).clamp(0, 1).reshape(logits.shape)
        scaled, weights = logits / self.temperature, _public_weights(self.pos_weight, logits)
        if self.slope < 1:
            weighted = goal if weights is None else goal * weights
            losses = weighted * _saturating(-scaled, self.slope) + (1 - goal) * _saturating(scaled, self.slope)
        else:
            losses = F.binary_cross_entropy_with_logits(scaled, goal, reduction="none", pos_weight=weights)
        return _of_examples(losses)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        weights = self.pos_weight or (1.0,)
        if len(weights) not in (1, *shape[-1:]):
            raise ValueError(f"pos_weight={weights}, and outputs of shape {shape}. HINT: give one, or one for each.")
        entries = math.prod(shape) / len(weights) * sum(max(1.0, w) ** 2 for w in weights)
        return self.slope * math.sqrt(entries) / self.temperature


@dataclass(frozen=True)
class MulticlassHinge(Loss):
    """Multi-class hinge of the thesis, section 2.5: the sum over j != y of max(0, margin - z_y + z_j), divided by c.

    The Lipschitz constant is sqrt((c - 1) / c) < 1: if k classes violate the margin, the gradient's squared norm is
    (k + k^2) / c^2, which is largest at k = c - 1.
    """

    task = "classification"
    margin: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(margin=self.margin, hint="1.0 is usual.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        classes = logits.shape[1]
        right = logits.gather(1, target.unsqueeze(1))
        slack = (self.margin - right + logits).clamp_min(0).scatter(1, target.unsqueeze(1), 0.0)
        return slack.flatten(1).sum(1) / classes

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        positions, classes = _positions(shape), shape[0]
        return math.sqrt((classes - 1) / classes) * math.sqrt(positions)


@dataclass(frozen=True)
class CosineSimilarity(Loss):
    """Computes 1 - cos(logits, one-hot target), with the logits' norm clamped from below at m = ``min_norm``.

    The Lipschitz constant is 1/m: z / max(m, ||z||) has a Jacobian of norm at most 1/m on either side of the clamp, and
    the target is a unit vector. Without the clamp there is no constant, since the cosine is not Lipschitz at zero.
    """

    task = "classification"
    min_norm: float = 1.0

    def __post_init__(self) -> None:
        reason = "; cosine similarity has no Lipschitz constant at zero"
        _check_positive(min_norm=self.min_norm, reason=reason, hint="min_norm=1.0, or the scale of your logits.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(logits, dim=1, keepdim=True).clamp_min(self.min_norm)
        similarity = (logits / size).gather(1, target.unsqueeze(1)).squeeze(1)
        return _of_examples(1 - similarity)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(_positions(shape)) / self.min_norm


@dataclass(frozen=True)
class Huber(Loss):
    """Huber loss with threshold delta, summed over m outputs; its Lipschitz constant is delta * sqrt(m)."""

    task = "regression"
    delta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(delta=self.delta, hint="1.0 is usual.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return _of_examples(F.huber_loss(logits, _goal(target, logits), reduction="none", delta=self.delta))

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return self.delta * math.sqrt(math.prod(shape))


@dataclass(frozen=True)
class AbsoluteError(Loss):
    """Absolute error, summed over m outputs; its Lipschitz constant is sqrt(m)."""

    task = "regression"

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return _of_examples((logits - _goal(target, logits)).abs())

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(math.prod(shape))


@dataclass(frozen=True)
class SmoothL1(Loss):
    """Absolute error with a parabola below beta, summed over m outputs: the Huber loss over its threshold.

    The Lipschitz constant is sqrt(m), whatever beta is: each output's derivative is d / max(beta, |d|).
    """

    task = "regression"
    beta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(beta=self.beta, hint="1.0 is usual; 'l1' is the loss at 0.")

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return _of_examples(F.smooth_l1_loss(logits, _goal(target, logits), reduction="none", beta=self.beta))

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(math.prod(shape))


@dataclass(frozen=True)
class SquaredError(Loss):
    """Half the squared error with the output and the target projected onto public balls.

    The projection is 1-Lipschitz, so the gradient norm is at most ``output_bound + target_bound``. Without both bounds
    the loss would have no constant.
    """

    task = "regression"
    output_bound: float = 1.0
    target_bound: float = 1.0

    def __post_init__(self) -> None:
        reason = " and finite; squared error is only Lipschitz with a bounded output and target"
        hint = "declare the public range of the target, or use Huber."
        _check_positive(output_bound=self.output_bound, target_bound=self.target_bound, reason=reason, hint=hint)

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        flat = logits.unsqueeze(-1).flatten(1)
        goal = torch.nan_to_num(target.to(logits.dtype)).reshape(flat.shape)
        difference = to_ball(flat, self.output_bound) - to_ball(goal, self.target_bound)
        return difference.square().sum(1) / 2

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        return self.output_bound + self.target_bound


def to_ball(rows: Tensor, radius: float) -> Tensor:
    """Returns each row projected onto the ball of a radius; rows inside it are unchanged."""
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows * (radius / size.clamp_min(radius))


_MEAN = (
    "a mean over the batch divides every example's gradient by the private batch size, so one example's "
    "contribution depends on all others"
)


def _from_torch(loss: nn.Module) -> Loss:
    hint = "HINT: use reduction='none' or 'sum', or a loss of lipdp_lightning.bounds.losses"
    reduction = getattr(loss, "reduction", None)
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"loss {type(loss).__name__} has no known Lipschitz constant. {_LOSS_HINT}.")
    if reduction == "mean":
        raise ValueError(f"loss {type(loss).__name__}(reduction='mean'): {_MEAN}. {hint}.")
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.weight is not None and loss.label_smoothing:
            raise ValueError(
                f"loss CrossEntropyLoss with both weight and label_smoothing is not supported. {_LOSS_HINT}."
            )
        weights = None if loss.weight is None else tuple(float(w) for w in loss.weight)
        return CrossEntropy(label_smoothing=loss.label_smoothing, class_weights=weights, ignore_index=loss.ignore_index)
    if isinstance(loss, nn.BCEWithLogitsLoss) and loss.weight is None:
        return BinaryCrossEntropy(pos_weight=None if (w := loss.pos_weight) is None else tuple(w.flatten().tolist()))
    if isinstance(loss, nn.HuberLoss):
        return Huber(delta=loss.delta)
    if isinstance(loss, nn.SmoothL1Loss):
        return SmoothL1(beta=loss.beta) if loss.beta else AbsoluteError()
    if isinstance(loss, nn.L1Loss):
        return AbsoluteError()
    if isinstance(loss, nn.MultiMarginLoss) and loss.weight is None and loss.p == 1:
        return MulticlassHinge(margin=loss.margin)
    if isinstance(loss, nn.MSELoss):
        raise ValueError(
            "loss MSELoss has no Lipschitz constant: outputs and targets are unbounded. "
            "HINT: use SquaredError(output_bound=..., target_bound=...), or Huber(delta=...)."
        )
    raise ValueError(f"loss {type(loss).__name__} has no known Lipschitz constant. {_LOSS_HINT}.")


LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": CrossEntropy,
    "soft_cross_entropy": SoftCrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "hinge": MulticlassHinge,
    "cosine": CosineSimilarity,
    "huber": Huber,
    "l1": AbsoluteError,
    "smooth_l1": SmoothL1,
    "squared_error": SquaredError,
}
_LOSS_HINT = f"HINT: use one of {', '.join(LOSSES)}, or a subclass of lipdp_lightning.bounds.losses.Loss"


def as_loss(loss: Loss | nn.Module | str) -> Loss:
    """Returns a certified loss.

    Args:
        loss: A Loss, the name of one, or a loss of torch whose reduction is a sum or none.

    Raises:
        ValueError: If no Lipschitz constant is known.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"loss {loss!r} is unknown. {_LOSS_HINT}.")
        return LOSSES[loss]()
    if isinstance(loss, nn.Module):
        return _from_torch(loss)
    raise ValueError(f"loss {loss!r} has no known Lipschitz constant. {_LOSS_HINT}.")


@dataclass(frozen=True)
class SaturatingCrossEntropy(CrossEntropy):
    """Cross-entropy up to the error probability ``slope``, continued by its tangent.

    The Lipschitz constant is ``slope`` times that of cross-entropy. With the margin m = (logsumexp of the other logits)
    - (the true one), cross-entropy is softplus(m), whose derivative is the error probability 1 - p_y; here the
    derivative is min(1 - p_y, slope). The gradient of m is (softmax over the other classes) - e_y, of norm at most
    sqrt(2), which is attained if one other class has all the mass. The loss is convex in the logits, as an increasing
    convex function of the convex m. All examples that are far on the wrong side have gradients of the same size.

    A small slope makes the bound small, and with it the noise, while the gradients of most examples keep their size.
    """

    slope: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.slope < 1:
            raise ValueError(f"slope={self.slope} is outside (0, 1). HINT: use 0.15; 'cross_entropy' is the loss at 1.")
        if self.label_smoothing:
            raise ValueError("label_smoothing has no margin to saturate. HINT: leave it at 0, or use CrossEntropy.")

    def _of_labels(self, scaled: Tensor, target: Tensor) -> Tensor:
        index = self._known(target).unsqueeze(1)
        others = scaled.scatter(1, index, -math.inf)
        margin = (torch.logsumexp(others, 1, keepdim=True) - scaled.gather(1, index)).squeeze(1)
        return _saturating(margin, self.slope).where(target != self.ignore_index, 0)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        if shape and shape[0] < 2:
            raise ValueError("saturating cross-entropy needs two classes or more. HINT: use 'binary_cross_entropy'.")
        return self.slope * super().lipschitz(shape)
