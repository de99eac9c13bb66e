"""Sums predictions and outcomes by bins, as integers: exactly, in whatever order and on whatever processes.

The probability of each row is rounded to a multiple of 2^-32 and its loss to one of 2^-24 before they are added, so a
sum over shares of the rows equals the sum over all of them to the last bit. Bins are (a, b], the first closed at 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor

from lipdp_lightning.calibration.probabilities import class_labels, log_probabilities, logits_of_probabilities

UNIT = 1 << 32  # unit of probabilities, for up to 2^31 rows
LOSS_UNIT = 1 << 24
LARGEST_LOSS = 1 << 20  # largest loss of one row, of which 2^19 can be added
DEFAULT_BINS = 15


def sum_shapes(classes: int, bins: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the states; ``top_*`` are of the predicted class, ``class_*`` of each class against the
    rest.
    """
    return {
        "rows": (), "undefined": (), "impossible": (), "nll": (),
        "top_rows": (bins,), "top_predicted": (bins,), "top_observed": (bins,),
        "class_rows": (classes, bins), "class_predicted": (classes, bins), "class_observed": (classes, bins),
        "class_nll": (classes,), "class_impossible": (classes,), "class_brier": (classes,),
    }  # fmt: skip


def binned_sums(log_p: Tensor, labels: Tensor, bins: int = DEFAULT_BINS) -> dict[str, Tensor]:
    """Returns the sums of rows of log-probabilities (n, classes) with labels (n,), as int64.

    Rows that are not finite are counted as ``undefined`` and in no other sum; rows to which probability 0 was given are
    counted as ``impossible``.
    """
    classes = log_p.shape[1]
    labels = class_labels(labels, classes)
    if len(labels) != len(log_p):
        raise ValueError(f"{len(log_p)} predictions and {len(labels)} labels. HINT: give one label per prediction.")
    defined = ~log_p.isnan().any(1)
    undefined = (~defined).sum()
    log_p, labels = log_p[defined], labels[defined]
    truth = torch.nn.functional.one_hot(labels, classes).bool()
    p = log_p.exp()
    units = _whole(p, UNIT)
    own = log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    top_units, top = units.max(1)
    kinds = torch.arange(classes, device=p.device)
    against_rest = -_one_against_rest(log_p, truth)
    sums = {
        "rows": torch.tensor(len(labels), device=p.device),
        "undefined": undefined,
        "impossible": own.isinf().sum(),
        "nll": _whole(_bounded(-own), LOSS_UNIT).sum(),
        "class_nll": _whole(_bounded(against_rest), LOSS_UNIT).sum(0),
        "class_impossible": against_rest.isinf().sum(0),
        "class_brier": _whole((p - truth.double()) ** 2, UNIT).sum(0),
    }
    sums |= _diagram("top", top_units, top == labels, torch.zeros_like(top), 1, bins)
    sums |= _diagram("class", units.flatten(), truth.flatten(), kinds.repeat(len(labels)), classes, bins)
    for name in ("top_rows", "top_predicted", "top_observed"):
        sums[name] = sums[name].squeeze(0)
    return sums


def _diagram(name: str, units: Tensor, outcomes: Tensor, kind: Tensor, kinds: int, bins: int) -> dict[str, Tensor]:
    """Returns per kind and bin: rows, their summed probability, and the number of observed events."""
    # ceil(units * bins / UNIT) - 1 in integers, so that rounding does not decide on which side of an edge a row lies
    index = ((units * bins + UNIT - 1) // UNIT - 1).clamp(0, bins - 1)
    place = kind * bins + index

    def add(values: Tensor) -> Tensor:
        total = torch.zeros(kinds * bins, dtype=torch.int64, device=units.device)
        return total.index_add_(0, place, values).reshape(kinds, bins)

    return {
        f"{name}_rows": add(torch.ones_like(units)),
        f"{name}_predicted": add(units),
        f"{name}_observed": add(outcomes.long()),
    }


def _one_against_rest(log_p: Tensor, truth: Tensor) -> Tensor:
    """Returns log p_k if k is the row's class, else log(1 - p_k); for the likeliest class it is computed from the
    others' sum, without cancellation.
    """
    top = log_p.argmax(1, keepdim=True)
    others = log_p.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    against = torch.log1p(-log_p.exp().clamp(max=1.0)).scatter(1, top, others)
    return torch.where(truth, log_p, against)


def _bounded(losses: Tensor) -> Tensor:
    return losses.clamp(0.0, float(LARGEST_LOSS))


def _whole(values: Tensor, unit: int) -> Tensor:
    return (values * unit).round().long()


class CalibrationSums(torchmetrics.Metric):
    """The sums of all rows seen, by every process; `lipdp_lightning.calibration.scores_of_sums` turns them into scores.

    Args:
        classes: the number of classes; two for a binary task with one logit.
        bins: the number of bins of equal width on [0, 1].
        outputs: the inputs of `update`: 'logits', or 'probabilities', which are checked.
        temperature: logits are divided by it.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(
        self, classes: int, bins: int = DEFAULT_BINS, outputs: str = "logits", temperature: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        problems = [f"{classes} class(es) leave nothing to calibrate."] * (classes < 2)
        problems += [f"{bins} bins make no diagram."] * (not 1 <= bins <= 1 << 16)
        problems += [f"outputs={outputs!r} is neither 'logits' nor 'probabilities'."] * (
            outputs not in ("logits", "probabilities")
        )
        if problems:
            raise ValueError(f"{' '.join(problems)} HINT: use CalibrationSums(classes=10, bins={DEFAULT_BINS}).")
        self.classes, self.bins, self.outputs, self.temperature = classes, bins, outputs, temperature
        for name, shape in sum_shapes(classes, bins).items():
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        logits = logits_of_probabilities(predictions) if self.outputs == "probabilities" else predictions
        log_p = log_probabilities(logits, self.temperature)
        if log_p.shape[1] != self.classes:
            raise ValueError(
                f"predictions of {log_p.shape[1]} classes, and {self.classes} were declared. "
                "HINT: classes are dimension 1; one logit per row stands for two classes."
            )
        for name, value in binned_sums(log_p, labels, self.bins).items():
            setattr(self, name, getattr(self, name) + value)

    def compute(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in sum_shapes(self.classes, self.bins)}
