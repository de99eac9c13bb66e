"""Rows that a training has right, and the error of a difference over seeds and rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lipdp_lightning.studies.reproduce.correct_rows import CorrectRows, error_of_difference, rows_of


@pytest.mark.parametrize("task", ["binary", "classification"])
def test_rows_that_are_right_come_back_in_order(task: str) -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0])
    scores = torch.linspace(-1, 1, len(labels))
    expected = ((scores > 0) == labels.bool()).numpy()
    outputs = scores if task == "binary" else torch.stack([torch.zeros(len(labels)), scores], dim=1)
    callback, module = CorrectRows(), SimpleNamespace(task=task)
    for _ in range(2):  # a second evaluation starts anew
        callback.on_validation_epoch_start(None, module)
        for part in (slice(0, 4), slice(4, 11)):
            callback.on_validation_batch_end(None, module, {"outputs": outputs[part]}, (None, labels[part]), 0)
    assert np.array_equal(rows_of(callback.text()), expected)


def test_the_error_of_a_difference_is_its_spread_over_new_seeds_and_new_rows() -> None:
    """Both methods err on hard rows; which rows are hard is drawn anew with the rows, and each seed has its luck."""
    generator = np.random.default_rng(0)
    seeds, rows = 10, 300

    def drawn() -> tuple[float, float]:
        hard = generator.random(rows)
        luck = 0.03 * generator.standard_normal((2, seeds, 1))
        right = generator.random((2, seeds, rows)) < np.clip(0.5 + hard / 2 + luck, 0, 1)
        favour = generator.random(rows) < 0.1  # rows that one method has right, always
        right[0][:, favour] = True
        texts = [[f"{rows}:{np.packbits(row).tobytes().hex()}" for row in method] for method in right]
        return float(right[0].mean() - right[1].mean()), error_of_difference(*texts)

    found = np.array([drawn() for _ in range(400)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.1)
    # the spread over seeds alone is smaller: it knows one choice of rows
    assert found[:, 1].min() > 0


def test_methods_that_are_right_on_the_same_rows_do_not_differ() -> None:
    text = f"9:{np.packbits(np.ones(9, dtype=bool)).tobytes().hex()}"
    assert error_of_difference([text] * 3, [text] * 3) == 0.0
