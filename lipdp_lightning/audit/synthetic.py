"""Makes up rows in the shape of a data module's, so that an audit of the algorithm reads no private row."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..training.module import PrivateModule
from .subject import Subject

MOST_ROWS = 512


def made_up_data(subject: Subject, like: Any, seed: int = 0) -> Any:
    """Returns a data module of random rows; the sampler sees fewer rows than declared, at the plan's rate."""
    return rows_like(like, *made_up_rows(subject, like, seed))


def made_up_rows(subject: Subject, like: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the features and labels that ``made_up_data`` holds."""
    x, y, _ = subject.examples(min(like.dataset_size, MOST_ROWS), seed)
    return x, y


def rows_like(like: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Returns a data module of these rows, with the declarations of another."""
    from ..data_modules.base import PrivateDataModule

    class MadeUp(PrivateDataModule):
        input_shape = tuple(like.input_shape)
        task = like.task
        num_classes = like.num_classes
        target_bound = like.target_bound
        declared_size = like.dataset_size

        def setup(self, stage: str | None = None) -> None:
            from ..data_modules.poisson import InMemoryRows

            self._train = InMemoryRows(x, y)

        def load_train(self) -> tuple[torch.Tensor, torch.Tensor]:
            return x, y

    return MadeUp()


def plain_copy(module: PrivateModule) -> PrivateModule:
    """Copies network, loss and input bound, without the trainer; the optimizer is post-processing, so the default will
    do.
    """
    return PrivateModule(
        copy.deepcopy(module.network), module.private_loss(None), input_bound=module.input_bound,
        input_mode=module.bounded_input.mode, color_space=module.bounded_input.color_space,  # type: ignore[arg-type]
    )  # fmt: skip
