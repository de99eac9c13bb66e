"""`precision: 64-true` trains, resumes and evaluates in float64, also where rows come as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Blobs, Crash, fit, make_plan
from torch import Tensor

from lipdp_lightning.callbacks import ResumeCheckpoint

DOUBLE: dict[str, Any] = {"precision": "64-true"}


class Bytes(Blobs):
    """The clusters as bytes, which become floats on the device."""

    scale, offset = 1 / 255, -0.1

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return (x.clamp(0, 1) * 255).to(torch.uint8), y


def weights(module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.network.parameters()]


def test_rows_of_bytes_and_of_floats_train_in_float64() -> None:
    for data in (Bytes(), Blobs()):
        module, trainer = fit(make_plan(), data=data, trainer_options=DOUBLE)
        assert trainer.global_step == 12
        assert all(w.dtype == torch.float64 and w.isfinite().all() for w in weights(module))
        rows = data.made_up_batch(2)
        assert rows is not None and module(rows[0]).dtype == torch.float64


def test_a_run_in_float64_is_continued_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = fit(make_plan(), data=Bytes(), trainer_options=DOUBLE)
    keeper = ResumeCheckpoint(tmp_path / "checkpoints", every_n_steps=3)
    with pytest.raises(InterruptedError):
        fit(make_plan(), Crash(6), keeper, data=Bytes(), directory=tmp_path, trainer_options=DOUBLE)
    again = ResumeCheckpoint(tmp_path / "checkpoints", every_n_steps=3)
    last = tmp_path / "checkpoints" / "last.ckpt"
    module, _ = fit(make_plan(), again, data=Bytes(), directory=tmp_path, checkpoint=last, trainer_options=DOUBLE)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(module), strict=True))
