"""Converts the outputs of a network to log-probabilities, and refuses outputs that are none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = 1e-3  # tolerance on a sum of probabilities, which a softmax in half precision keeps


def log_probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns log softmax(logits / temperature) in float64, one row per prediction and one column per class.

    One logit per row, as (n,) or (n, 1), is that of class 1 of two. Classes are dimension 1; further dimensions, such
    as the pixels of a segmentation, become rows. For given probabilities p, pass ``logits = log p``.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature {temperature} is not positive and finite. HINT: 1 leaves probabilities alone.")
    scores = logits.detach().double()
    if scores.dim() < 2 or scores.shape[1] == 1:
        scores = scores.reshape(-1, 1)
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    elif scores.dim() > 2:
        scores = scores.movedim(1, -1).reshape(-1, scores.shape[1])
    return torch.log_softmax(scores / temperature, dim=1)


def class_labels(labels: Tensor, classes: int) -> Tensor:
    """Returns labels as integers in [0, classes), one per prediction."""
    found = labels.reshape(-1)
    whole = found.round().long() if found.is_floating_point() else found.long()
    wrong = (whole < 0) | (whole >= classes)
    if found.is_floating_point():
        wrong = wrong | (whole != found)
    if bool(wrong.any()):
        raise ValueError(
            f"a label is {found[wrong][0].item():g}, and there are {classes} classes. "
            f"HINT: labels are whole numbers from 0 to {classes - 1}."
        )
    return whole


def check_labels(labels: Tensor, classes: int) -> Tensor:
    """Returns :func:`class_labels`, and refuses rows of one class only, about which nothing is over- or
    under-confident.
    """
    found = class_labels(labels, classes)
    present = found.unique()
    if classes < 2 or len(present) < 2:
        which = f"all {len(found)} rows have class {present[0].item()}" if len(present) else "there are no rows"
        raise ValueError(
            f"calibration needs rows of at least two classes, and {which}. "
            "HINT: hold out more rows, or a split that keeps the classes; one class alone leaves nothing to calibrate."
        )
    return found


def check_probabilities(probabilities: Tensor) -> Tensor:
    """Returns probabilities in float64; refuses values outside [0, 1] and rows of classes that do not sum to one."""
    found = probabilities.detach().double()
    if not bool(torch.isfinite(found).all()) or bool((found < 0).any()) or bool((found > 1 + TOLERANCE).any()):
        raise ValueError(
            "a predicted probability is not in [0, 1]. "
            "HINT: these may be logits; say outputs='logits', or apply a softmax."
        )
    if found.dim() > 1 and found.shape[1] > 1:
        sums = found.sum(1)
        wrong = (sums - 1).abs() > TOLERANCE
        if bool(wrong.any()):
            raise ValueError(
                f"predicted probabilities sum to {sums[wrong].flatten()[0].item():.6g} over the classes, not to one. "
                "HINT: apply a softmax; scores of classes that do not exclude each other are binary tasks of their own."
            )
    return found


def logits_of_probabilities(probabilities: Tensor) -> Tensor:
    """Returns logits with these probabilities; one probability per row is that of class 1 of two."""
    found = check_probabilities(probabilities)
    if found.dim() > 1 and found.shape[1] > 1:
        return found.log()
    found = found.clamp(max=1.0)
    return found.log() - torch.log1p(-found)
