"""Implements augmentation multiplicity: every example enters a step as the mean over several augmented views of it."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from torch import nn

from lipdp_lightning.augmentations import HorizontalFlip, ShiftedCrop
from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.training.views import Views


class AugmentationMultiplicity(Callback):
    """Trains on K views of each example of a step, drawn on the device: K forward passes for one pass over the data.

    Each view is a row that is bounded, scaled and clipped by itself, and the mechanism divides the summed gradient
    by K before noise is added: the mean of K bounded gradients has the bound of one, so that noise, epsilon and
    ledger are those of the run without views. The views of an example depend on the secret, the step and the
    example's id. They repeat when a step is repeated, and do not depend on other examples of the batch, on the
    number of processes or on ``physical_batch_size``, which counts views as rows.

    Args:
        views: the number K of views per example.
        augmentations: torch modules that map (rows, *shape) to the same shape, applied in order; by default a
            horizontal flip and a crop shifted by up to 4 pixels, for images. A module that mixes rows is refused in
            set-up.
    """

    def __init__(self, views: int = 16, augmentations: list[nn.Module] | None = None) -> None:
        chosen = [HorizontalFlip(), ShiftedCrop()] if augmentations is None else augmentations
        self.views = Views(views, chosen)

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            assert _strategy(trainer).views is self.views, "the Strategy was set up before this callback was there"

    def report_notes(self) -> list[str]:
        """Returns a line for the report."""
        return [f"each example's gradient is the mean over {self.views}: its bound is that of one view"]
