"""Scores of class predictions on held-out rows that show whether a model does more than name the frequent class."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities.data import dim_zero_cat


class ClassScores(torchmetrics.Metric):
    """Collects class probabilities and labels, and compares them with the most frequent class.

    Like an accuracy, the scores are exact functions of the rows they are computed on. Every process evaluates all
    held-out rows: with those of the others, each row would count several times, and the standard error be too small.
    """

    full_state_update = False
    probabilities: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("probabilities", default=[])
        self.add_state("labels", default=[])

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Adds rows: logits of each class, or one probability per row of the second of two classes."""
        exact = predicted.detach().double()  # in float32, small logits of a barely trained network become ties
        two = predicted.dim() == 1
        self.probabilities.append(torch.stack([1 - exact, exact], dim=1) if two else exact.softmax(dim=1))
        self.labels.append(labels.detach())

    def compute(self) -> dict[str, Tensor]:
        """Returns the share of the most frequent class, the standard error of the accuracy's difference from it,
        the balanced accuracy, and the mean AUROC of the classes, each against the rest (NaN if only one occurs).
        """
        probabilities, labels = dim_zero_cat(self.probabilities), dim_zero_cat(self.labels)
        rows, classes = probabilities.shape
        counts = labels.bincount(minlength=classes)
        right = probabilities.argmax(dim=1) == labels
        gain = right.double() - (labels == counts.argmax()).double()
        present = counts > 0
        recognised = labels[right].bincount(minlength=classes)[present] / counts[present]
        areas = [
            binary_auroc(probabilities[:, index], (labels == index).long(), validate_args=False)
            for index in range(classes)
            if 0 < counts[index] < rows
        ]
        undefined = probabilities.new_tensor(torch.nan)
        finite = bool(probabilities.isfinite().all())
        return {
            "majority_rate": counts.max() / rows,
            "standard_error": gain.std() / rows**0.5 if rows > 1 else undefined,
            "balanced_accuracy": recognised.double().mean(),
            "auroc": torch.stack(areas).mean() if areas and finite else undefined,
        }
