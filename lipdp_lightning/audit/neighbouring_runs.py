"""Asks about two runs on made-up neighbouring data whether anything moves that no noise covers."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import Any

import torch

from ..privacy.keys import derive_key
from ..privacy.plan import PrivacyPlan
from ..privacy.sampling import poisson_sample
from ..training.module import PrivateModule
from .brief_training import train_briefly
from .findings import Finding, verdict
from .paired_runs import Scribe, Seen, SeenLogger, TranscribedStrategy, paired_runs
from .subject import SECRET, Example, Subject
from .synthetic import made_up_rows, rows_like

MOST_STEPS = 40
_SHOWN = 5


def neighbouring_finding(
    module: PrivateModule, plan: PrivacyPlan, data: Any, subject: Subject, example: Example, seed: int = 0
) -> Finding:
    """Trains on made-up rows with and without ``example``, and compares everything that can be seen of the two runs.

    Statistics released before the steps are left out, since made-up data have none.
    """
    plan, steps = dataclasses.replace(plan, preliminary=()), min(plan.steps, MOST_STEPS)
    secret = derive_key(SECRET, "neighbouring runs", seed)[:16]
    x, y = made_up_rows(subject, data, seed)
    place = _drawn_most(plan, len(x), steps, secret)
    x[place], y[place] = example

    def run(scribe: Scribe) -> None:
        kept = torch.arange(len(x)) != (-1 if scribe.absent is None else scribe.absent)
        strategy = TranscribedStrategy(plan, scribe=scribe, fixed_secret=secret)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            train_briefly(
                copy.deepcopy(module), rows_like(data, x[kept], y[kept]), strategy, steps, callbacks=[Seen(scribe)],
                logger=SeenLogger(scribe),
            )  # fmt: skip

    found = paired_runs(run, place, plan, len(x), secret, steps)
    touched = sum(size > 0 for size in found.moved.values())
    text = (
        f"An example takes part in {touched} of {len(found.moved)} releases; it moves one by {found.largest:.3f} times "
        "the sensitivity that its noise is made for"
    )
    if found.faults:
        text += f", and there are {len(found.faults)} faults: {' '.join(found.faults[:_SHOWN])}"
    else:
        text += ", and everything else that can be seen of the two runs is equal."
    return Finding(
        "neighbouring runs", "Is all that one example changes in a run covered by noise?", verdict(bool(found.faults)),
        text, factor=found.largest,
        values={"steps": steps, "touched": touched, "faults": list(found.faults)},
    )  # fmt: skip


def _drawn_most(plan: PrivacyPlan, rows: int, steps: int, secret: bytes) -> int:
    """Returns the row that most of the steps draw, neither the first nor the last where there are others."""
    drawn: Counter[int] = Counter()
    for step in range(steps):
        drawn.update(poisson_sample(secret, step, rows, plan.sample_rate).tolist())
    inside = range(1, rows - 1) if rows > 2 else range(rows)
    return max(inside, key=lambda row: drawn[row])
