"""Statistics of the private rows that are released once, before the first step, each with its own noise.

A statistic is a noisy mean: the sum of one vector per row, plus Gaussian noise, divided by the DECLARED N. Its
sensitivity is enforced here and not left to the caller: every row's vector is scaled into the unit ball and summed in
whole multiples of 2^-40, so that adding or removing a row changes the sum by at most 1, for all other rows and in any
order. With noise of standard deviation s in every coordinate of the sum, it is a Gaussian mechanism of noise multiplier
s on all rows: one entry of the plan's ledger (`PrivacyPlan.preliminary`), composed with the steps.

Two answers with the same noise would show the difference of two sums exactly. Hence each statistic has its own key, and
a run releases each one ONCE: the values are kept in its directory and in its checkpoints, and a continued run uses
these. If they are lost, the run is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.files import write_bytes_atomically
from lipdp_lightning.kernels.normals import SECURE_SAMPLES, release_
from lipdp_lightning.privacy.grid import grid_shift
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.privacy.plan import PrivacyPlan

UNIT = 2.0**40  # sums are whole multiples of 1 / UNIT: exact, for up to 2^22 rows of norm 1
MOST_ROWS = 1 << 22
# leaves room for rounding a row to the grid and the total to float64
RADIUS = 1 - 2.0**-20
_PIECE = 1 << 17  # so many numbers at a time stay in the processor's cache
_CONTENTS = "contents"
_FORMAT = 1


@dataclass(frozen=True)
class Terms:
    """The terms of a statistic, which is their mean: ``parts`` are tensors (n, dimension) with a row per example.

    The dimension is public. An example's row must depend on that example alone and on public values.
    """

    dimension: int
    parts: Iterable[Tensor]


def bounded_sum(terms: Terms) -> Tensor:
    """Returns the exact sum, in float64, of the rows scaled into the unit ball; it is not private.

    Adding or removing a row changes it by at most 1. Entries that are not finite count as zero.
    """
    total = torch.zeros(terms.dimension, dtype=torch.int64)
    count = 0
    for part in terms.parts:
        if part.dim() != 2 or part.shape[1] != terms.dimension:
            raise ValueError(
                f"rows of shape {tuple(part.shape)} were given for a statistic of dimension {terms.dimension}.\n"
                "HINT: give one row of that many numbers for each example."
            )
        count += len(part)
        if count > MOST_ROWS:
            raise ValueError(f"a statistic sums at most {MOST_ROWS} rows exactly.\nHINT: declare a subset of the rows.")
        for rows in torch.split(part, max(1, _PIECE // max(1, terms.dimension))):
            total += _on_grid(rows).sum(0)
    return total.to(torch.float64) / UNIT


def _on_grid(rows: Tensor) -> Tensor:
    """Returns each row, scaled into the unit ball and rounded to whole multiples of 1 / UNIT."""
    rows = torch.nan_to_num(rows.detach().to("cpu", torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if rows.shape[1]:  # the squares of large entries would overflow
        rows = rows / rows.abs().amax(1, keepdim=True).clamp_min(1.0)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (rows * (RADIUS / norms.clamp_min(RADIUS)) * UNIT).round_().to(torch.int64)


def noisy_mean(terms: Terms, noise_multiplier: float, dataset_size: int, key: bytes, secure: bool = False) -> Tensor:
    """Returns (bounded sum + noise) / dataset_size, in float64: a Gaussian mechanism of that noise multiplier.

    The noised sum is rounded to its public grid (privacy/grid.py) before it is divided.
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(
            f"a statistic with noise multiplier {noise_multiplier} is not private.\n"
            "HINT: use about 10, beside the noise of training."
        )
    samples, total = SECURE_SAMPLES if secure else 1, bounded_sum(terms)
    release_(total, key, noise_multiplier, samples=samples, shift=grid_shift(noise_multiplier))
    return total / dataset_size


class Statistics:
    """The released statistics of one run, in the file ``path``, or in checkpoints alone without a run directory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.values: dict[str, Tensor] = {}

    def settle(
        self,
        plan: PrivacyPlan,
        terms: Callable[[str], Terms],
        saved: Mapping[str, Tensor] | None,
        started: bool,
        secret: bytes,
    ) -> dict[str, Tensor]:
        """Returns the run's statistics: those that it has released before, or else a first and only release.

        Args:
            plan: the run's plan; `plan.preliminary` lists the releases, which are accounted for.
            terms: returns the terms of the statistic with a label.
            saved: the statistics in the checkpoint that the run is continued from.
            started: whether the run has begun before, so that it has released its statistics.
            secret: a fresh secret, which is used for this release alone.

        Raises:
            ValueError: if the run has released statistics that are lost, or others than these.
        """
        if not plan.preliminary:
            return {}
        labels = [label for label, _ in plan.preliminary]
        kept = self.values or _read(self._path, plan)
        if kept and saved and not _equal(kept, saved):
            raise ValueError(
                f"the checkpoint has other statistics ({', '.join(saved)}) than this run has released; its weights "
                "come from a second release that this run's ledger does not count.\n"
                "HINT: continue the run in the directory that it was started in."
            )
        values = kept or dict(saved or {})
        if values:
            if sorted(values) != sorted(labels):
                raise ValueError(
                    f"the run has released {', '.join(values)}, and its plan says {', '.join(labels)}.\n"
                    "HINT: start a new run with a directory of its own."
                )
        elif started:
            raise ValueError(
                f"the statistics that this run has released ({', '.join(labels)}) are lost"
                f"{f', {self._path} is missing' if self._path else ''}. Releasing them again would spend a budget that "
                "nobody accounts for.\nHINT: restore them from a backup, or start a new run."
            )
        else:
            values = {
                label: noisy_mean(terms(label), level, plan.dataset_size, _key(secret, plan, index), plan.secure)
                for index, (label, level) in enumerate(plan.preliminary)
            }
        if self._path is not None and not self._path.exists():
            _write(self._path, values, plan)
        self.values = {label: values[label] for label in labels}
        return self.values

    def digest(self) -> bytes:
        """Returns the SHA-256 hash of labels and values, which identifies a run's statistics."""
        digest = hashlib.sha256()
        for label, value in self.values.items():
            digest.update(f"{len(label)} {label} {tuple(value.shape)}".encode() + value.numpy().tobytes())
        return digest.digest()


def _key(secret: bytes, plan: PrivacyPlan, index: int) -> bytes:
    """Returns the key of the statistic at a position, so that two of the same name share no noise."""
    return derive_key(secret, "statistic", index, plan.digest())


def _equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[label]) for label, value in left.items())


def _write(path: Path, values: Mapping[str, Tensor], plan: PrivacyPlan) -> None:
    """Writes the values to the disk, completely or not at all, before the first step."""
    contents = {"format": _FORMAT, "plan": plan.digest().hex(), "labels": list(values)}
    arrays: dict[str, Any] = {f"value{i}": value.numpy() for i, value in enumerate(values.values())}
    arrays[_CONTENTS] = np.frombuffer(json.dumps(contents).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_bytes_atomically(path, buffer.getvalue())


def _read(path: Path | None, plan: PrivacyPlan) -> dict[str, Tensor]:
    """Returns the values on disk; the dict is empty if nothing was released."""
    if path is None or not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            contents = json.loads(bytes(archive[_CONTENTS]).decode())
            values = {label: torch.from_numpy(archive[f"value{i}"]) for i, label in enumerate(contents["labels"])}
        if contents["format"] != _FORMAT or not all(
            v.dtype == torch.float64 and v.dim() == 1 and bool(torch.isfinite(v).all()) for v in values.values()
        ):
            raise ValueError("not vectors of finite numbers")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: the released statistics cannot be read ({error}).\n"
            "HINT: restore the file from a backup, or start a new run; a second release would not be accounted for."
        ) from error
    if contents["plan"] != plan.digest().hex():
        raise ValueError(
            f"{path} belongs to another privacy plan.\n"
            "HINT: use a new --run_dir, or the options with which the run was started."
        )
    return values
