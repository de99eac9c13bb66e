"""Implements ``--private-selection``: random settings, a random number of trials, and a release of the best model
alone.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ..accounting.events import LedgerEntry
from ..bound_text import upper_text
from ..experiment.short_training import Prepared, Result, merged, prepare
from ..files import OWNER_ONLY, read_bytes, write_bytes_atomically
from ..key_streams import CounterStream
from ..privacy.grid import grid_shift
from ..privacy.keys import derive_key, new_secret
from ..report.atomic import write_all_atomically
from ..training.batches import defined_here
from ..training.checkpoints import STATISTICS
from .counting import correct_rows
from .objectives import Objective
from .search import Search
from .selection import TrialCount, score_entry, selection_epsilon
from .space import Choice, Range, Space

MOST_PLANS = 64
_COUNT = "number of trials"
# ranges of these settings do not change the ledger of a trial
_FREE = ("clip_norm", "loss_clip", "radius", "scaling_floor", "max_norm", "switch_at", "physical_batch_size")


@dataclass(frozen=True)
class PrivateSelection:
    """Chooses the best trial: K from ``count``, scores of public rows or with noise of ``score_noise`` rows."""

    count: TrialCount
    objective: Objective
    score_noise: float | None

    def problems(self, base: Prepared, space: Space, sampler: str) -> list[str]:
        """Returns the reasons why the theorem would not hold."""
        plan, found = base.plan, []
        if sampler != "random":
            found.append(
                f"sampler {sampler} looks at earlier trials, and they must be independent. HINT: use --sampler random"
            )
        if plan.adjacency != "add_remove" or plan.unit != "example":
            found.append("it is accounted for add/remove of one example only. HINT: use privacy.adjacency=add_remove")
        if self.score_noise is not None and self.objective.name != "accuracy":
            found.append(
                f"noise is for counts of correct rows, not {self.objective.name}. HINT: use --objective accuracy"
            )
        for key, entry in space.items():
            name = key.removeprefix("privacy.")
            if key.startswith("data") or (name != key and isinstance(entry, Range) and name not in _FREE):
                found.append(
                    f"{key} changes what a trial spends; the worst of all must be known. HINT: give a list of values"
                )
        for callback in base.experiment.trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "monitor", None) is not None:
                name = type(callback).__name__
                found.append(f"callback {name} decides by a score that has no noise. HINT: leave it out of the search")
            if getattr(callback, "epsilon", None):
                name = type(callback).__name__
                found.append(f"callback {name} spends an epsilon that no ledger of a trial holds. HINT: leave it out")
        return found + self._problems_of_counting(base.experiment.trainer, base.experiment.datamodule)

    def _problems_of_counting(self, trainer: Any, data: Any) -> list[str]:
        """Returns why the evaluated rows may not be all rows, each once and by itself."""
        if self.score_noise is None:
            return []
        own = [] if defined_here(data, "val_dataloader") else [
            f"{type(data).__name__}.val_dataloader makes batches in a way of its own, and one row could move the count "
            "of correct rows by more than 1. HINT: return the rows from load_validation, or use --public-validation if "
            "they are public"
        ]  # fmt: skip
        whole = isinstance(trainer.limit_val_batches, float) and trainer.limit_val_batches == 1.0
        chosen = {
            "limit_val_batches": not whole,
            "fast_dev_run": bool(trainer.fast_dev_run),
            "overfit_batches": bool(trainer.overfit_batches),
        }
        return own + [
            f"trainer.{name} leaves out validation rows, and the score is a count of all of them. HINT: leave it out"
            for name, given in chosen.items()
            if given
        ]

    def ledgers(self, config: Mapping[str, Any], space: Space) -> list[tuple[LedgerEntry, ...]]:
        """Returns what any trial may spend, with its score: one ledger for each combination of listed
        privacy settings.
        """
        lists = {k: e.values for k, e in space.items() if k.startswith("privacy.") and isinstance(e, Choice)}
        combinations = list(itertools.product(*lists.values()))
        if len(combinations) > MOST_PLANS:
            raise ValueError(
                f"--private-selection: the space holds {len(combinations)} privacy settings, and the worst of them "
                f"must be known. HINT: use at most {MOST_PLANS}."
            )
        plans = [prepare(config, dict(zip(lists, chosen, strict=True))).plan for chosen in combinations]
        bare = [plan for plan in plans if not plan.certified]
        if bare:
            raise ValueError(
                f"--private-selection: scaling {bare[0].scaling!r} has no guarantee to start from. HINT: leave it out."
            )
        return [(*plan.events(), *self.score_entries()) for plan in plans]

    def score_entries(self) -> tuple[LedgerEntry, ...]:
        """Returns what the score of a trial spends."""
        return () if self.score_noise is None else (score_entry(self.score_noise),)

    def number_of_trials(self, study: Any) -> int:
        """Returns the number of trials, drawn once for a study as a function of nothing but the distribution."""
        if _COUNT not in study.user_attrs:
            stream = CounterStream(derive_key(new_secret(), "number of trials"))
            study.set_user_attr(_COUNT, self.count.draw(stream))
        return int(study.user_attrs[_COUNT])

    def score(self, result: Result, data: Any) -> float:
        """Returns the number that trials are compared by, larger is better; with noise, one row moves the count by at
        most 1.
        """
        if self.score_noise is None:
            value = self.objective.value(result)
            return value if self.objective.direction == "maximize" else -value
        noise = CounterStream(derive_key(new_secret(), "score")).normal(1).item()
        shift = grid_shift(self.score_noise)
        return (correct_rows(result.module, data) + self.score_noise * noise + shift) - shift


class BestTrial:
    """The best trial so far, with its model, in a file that is not part of the release.

    A trial is proposed, then recorded in the study as ended, then compared. Whenever the process is killed, a trial
    that was compared has ended: it is not tried again, and no setting has two draws of training and noise. A trial that
    was proposed and is not on record is forgotten and tried again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._candidate = path.with_name(f"candidate-{path.name}")
        for kept in (self.path, self._candidate):  # a damaged file is refused before any training
            if kept.exists():
                _read(kept)

    def content(self) -> dict[str, Any]:
        """Returns score, settings and model; ValueError if the file holds anything else. No code that it
        names is run.
        """
        return _read(self.path)

    def propose(self, trial: int, score: float, result: Result, params: Mapping[str, Any]) -> None:
        """Keeps the trial's model and score, without comparing them to anything."""
        strategy: Any = result.module.trainer.strategy
        model: dict[str, Any] = {"state_dict": result.module.state_dict()}
        if strategy.statistics.values:
            model[STATISTICS] = dict(strategy.statistics.values)
        found = {"trial": trial, "score": float(score), "params": dict(params), "model": model}
        write_bytes_atomically(self._candidate, _saved(found), OWNER_ONLY)

    def settle(self, ended: Callable[[int], bool]) -> None:
        """Compares the last proposed trial, if there is one and it is on record as ended."""
        if not self._candidate.exists():
            return
        found = _read(self._candidate)
        best = float(self.content()["score"]) if self.path.exists() else -math.inf
        if ended(found["trial"]) and found["score"] > best:
            os.replace(self._candidate, self.path)
        else:
            self._candidate.unlink()


def _read(path: Path) -> dict[str, Any]:
    """Returns the trial in a file; ValueError if the file holds anything else. No code that it names is run."""
    try:
        found = torch.load(io.BytesIO(read_bytes(path)), map_location="cpu", weights_only=True)
        if not (
            isinstance(found, dict)
            and isinstance(found["trial"], int)
            and isinstance(found["score"], float)
            and isinstance(found["params"], dict)
        ):
            raise ValueError("it holds no trial")
        kept = {name: found[name] for name in ("trial", "score", "params")}
        return {**kept, "model": dict(found["model"])}
    except Exception as error:  # the unpickler can raise almost any error
        reason = str(error).partition("\n")[0][:120]
        raise ValueError(
            f"{path} cannot be read ({reason}). HINT: it is the best trial so far; restore it from a backup, "
            "or begin the search anew with another --out."
        ) from error


def select(
    search: Search, selection: PrivateSelection, best: BestTrial, data: Any,
    ledgers: Collection[tuple[LedgerEntry, ...]],
) -> None:  # fmt: skip
    """Runs all K trials; nothing ends the search early. ``ledgers`` are those that the guarantee is computed from."""
    number = selection.number_of_trials(search.study)
    best.settle(search.has_ended)

    def keep(trial: int, result: Result) -> None:
        params = search.study.trials[trial].params
        spent = (*result.plan.events(), *selection.score_entries())
        assert spent in ledgers, f"a trial of {params} spends what the search does not account for"
        best.propose(trial, selection.score(result, data), result, params)

    search.run(number, keep, lambda: best.settle(search.has_ended))


def write_selection(
    out: Path, search: Search, selection: PrivateSelection, best: BestTrial, title: str, delta: float,
    ledgers: list[tuple[LedgerEntry, ...]],
) -> float:  # fmt: skip
    """Writes the model, its settings and its guarantee, and nothing about the other trials; returns the guarantee."""
    if not best.path.exists():
        raise ValueError("every trial of the search failed, so that there is no model. HINT: try a smaller space.")
    epsilon, found = selection_epsilon(ledgers, selection.count, delta), best.content()
    settings = yaml.safe_dump(merged(search.config, found["params"]), sort_keys=False)
    count = selection.count
    scored = (
        "public validation rows, as stated with --public-validation"
        if selection.score_noise is None
        else f"private validation rows, as a count with Gaussian noise of standard deviation {selection.score_noise:g}"
    )
    lines = [
        f"# Model selected over {title}",
        "",
        f"**epsilon = {upper_text(epsilon)} at delta = {upper_text(delta)}** for one example added to or removed "
        "from the data, training and choice together.",
        "",
        f"A number of trials was drawn from the truncated negative binomial distribution with eta = {count.eta:g} "
        f"and gamma = {count.gamma:.6g} (mean {count.mean():.4g}); each drew its settings at random from the space. "
        f"The best by its score on {scored} is released, and nothing else (Papernot & Steinke 2022, Theorem 2).",
        "",
        "The guarantee holds for `model.pt`, `best.yaml` and this page. It does not hold if anything in `private/`, "
        "the number of trials or the time that they took becomes known.",
        "",
    ]
    for key, value in found["params"].items():
        lines.append(f"* `{key}`: {value}")
    write_all_atomically(out, {"selection.md": "\n".join(lines) + "\n", "best.yaml": settings})
    write_bytes_atomically(out / "model.pt", _saved(found["model"]))
    return epsilon


def _saved(content: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
