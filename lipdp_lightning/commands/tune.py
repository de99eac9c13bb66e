"""Implements ``lipdp tune``: searches settings for the best compromises of accuracy and epsilon, and reports
the cost.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..bound_text import upper_text
from ..report.show import show
from .option_parser import OptionParser

_OWN = (
    "lipdp tune --config FILE --out DIR [--space FILE] [--trials 20] [--sampler tpe|botorch|random] "
    "[--objective accuracy,epsilon] [--storage FILE] [--seed 0] "
    "[--private-selection geometric|logarithmic|ETA (--public-validation | --score-noise S)] [--GROUP.KEY VALUE ...]"
)


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="lipdp tune", hint=_OWN,
        description="Search settings; every trial is a private training. Started again with the same options, a search "
        "continues. Other options override keys of the configuration, as in lipdp fit.",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="the experiment's YAML file")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--space", type=Path, help="YAML file of what to search, key: {low, high, log, integer} or key: [values]"
    )
    parser.add_argument(
        "--trials", type=int, default=20, help="number of trials, or its mean with --private-selection (default 20)"
    )
    parser.add_argument(
        "--sampler", choices=("tpe", "botorch", "random"), help="sampler (default tpe; random with --private-selection)"
    )
    parser.add_argument("--objective", help="comma-separated goals out of accuracy, mae, loss and epsilon")
    parser.add_argument("--storage", type=Path, help="SQLite file of the study (default OUT/study.sqlite)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sampler, which no guarantee rests on (default 0)"
    )
    parser.add_argument(
        "--private-selection",
        metavar="DIST",
        help="choose privately, with a geometric or logarithmic number of trials, or by an eta above -1",
    )
    parser.add_argument("--public-validation", action="store_true", help="state that the validation rows are public")
    parser.add_argument(
        "--score-noise",
        type=float,
        metavar="S",
        help="standard deviation of the noise on the count of correct validation rows",
    )
    own, rest = parser.parse_known_args(list(arguments))
    if own.trials < 1:
        raise ValueError(f"--trials {own.trials} is not positive. HINT: use --trials 20")
    if not 0 <= own.seed < 2**32:
        raise ValueError(f"--seed {own.seed} is not in [0, 2^32). HINT: use --seed 0")
    return own, rest


def _overrides(rest: Sequence[str]) -> dict[str, Any]:
    """Returns ``--a.b value`` and ``--a.b=value`` as a mapping."""
    found: dict[str, Any] = {}
    words = list(rest)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") or len(name) < 3 or (not equals and not words):
            raise ValueError(f"{name} is not an option with a value. HINT: {_OWN}")
        text = value if equals else words.pop(0)
        try:
            found[name[2:]] = yaml.safe_load(text)
        except yaml.YAMLError:
            found[name[2:]] = text
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 130 if the user interrupted the search, which can be continued."""
    own, rest = _split(arguments)
    overrides, count = _overrides(rest), _check_selection(own)
    from ..experiment.short_training import merged, prepare
    from ..extras import require
    from ..tuning.objectives import read_objectives
    from ..tuning.space import default_space, flat_keys, read_space

    config = merged(own.config, overrides)
    base = prepare(config)
    experiment, data = base.experiment, base.experiment.datamodule
    data.setup()
    selects = count is not None
    known = flat_keys(yaml.safe_load(experiment.resolved()))
    space = read_space(own.space, known) if own.space else default_space(known, data.dataset_size, not selects)
    usual = "mae" if data.task == "regression" else "accuracy"
    objectives = read_objectives(own.objective or (usual if selects else f"{usual},epsilon"), data.task)
    if not data.val_dataloader():
        raise ValueError(
            "there are no validation rows to choose by. HINT: set data.init_args.validation_fraction to 0.2"
        )
    require("optuna", "a search")
    own.sampler = own.sampler or ("random" if selects else "tpe")
    if selects:
        return _select(own, config, base, space, objectives, count)
    return _search(own, config, base, space, objectives, overrides)


def _identity(own: argparse.Namespace, config: Any, space: Any, objectives: Any, **more: Any) -> dict[str, str]:
    from ..tuning.space import plain
    from ..tuning.storage import identity_of

    return identity_of(
        configuration=config, space=plain(space), objective=[o.name for o in objectives], **more
    )  # fmt: skip


def _open(
    own: argparse.Namespace, path: Path, identity: dict[str, str], directions: list[str], seed: int | None
) -> Any:
    from ..tuning.storage import make_sampler, open_study

    if path.exists() and path.is_dir():
        raise ValueError(f"--storage {path} is a folder. HINT: name an SQLite file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    study = open_study(path, identity, directions, None)
    done = len(study.trials)
    study.sampler = make_sampler(own.sampler, None if seed is None else seed + done, own.trials)
    return study


def _search(
    own: argparse.Namespace, config: Any, base: Any, space: Any, objectives: Any, overrides: dict[str, Any]
) -> int:
    from ..tuning.cost import cost_of
    from ..tuning.search import Search, is_certified
    from ..tuning.search_files import cost_sentences, write_outputs
    from ..tuning.storage import locked

    path = own.storage or own.out / "study.sqlite"
    identity = _identity(own, config, space, objectives, selection=None)
    with locked(path):
        study = _open(own, path, identity, [o.direction for o in objectives], own.seed)
        own.out.mkdir(parents=True, exist_ok=True)
        search = Search(study, config, space, objectives, say=_say)
        if interrupted := search.take_back_interrupted():
            _say(f"{interrupted} interrupted trial(s) count as failed, and their settings are tried again")
        if search.finished:
            _say(f"continuing after {len(search.finished)} trials in {path}")
        code = 0
        try:
            search.run(own.trials)
        except KeyboardInterrupt:
            # its steps may have been released, and they count in what is written if the search ends here
            search.take_back_interrupted()
            _say("interrupted; the trial that was cut off counts as failed. Continue with the same command")
            code = 130
        certified = all(is_certified(t) for t in search.finished)
        cost = cost_of(search.finished, base.plan, certified)
        validation = validation_kind(base.experiment.datamodule)
        best = write_outputs(own.out, search, cost, own.config, validation, overrides, own.sampler)
    for sentence in cost_sentences(cost, validation)[:3]:
        _say(sentence)
    _say(f"{len(best)} trial(s) that no other beats: {own.out / 'pareto.md'}")
    return code if best or code else 1


def _check_selection(own: argparse.Namespace) -> Any:
    """Returns the distribution of the number of trials, or None; refuses what can be refused without data."""
    from ..tuning.selection import TrialCount

    if own.private_selection is None:
        if own.public_validation or own.score_noise is not None:
            raise ValueError(
                "--public-validation and --score-noise belong to --private-selection. HINT: leave them out."
            )
        return None
    if own.public_validation == (own.score_noise is not None):
        raise ValueError(
            "--private-selection needs a score that is private. "
            "HINT: use --public-validation if the validation rows are "
            "public, else --score-noise 20."
        )
    if own.score_noise is not None and not (math.isfinite(own.score_noise) and own.score_noise > 0):
        raise ValueError(f"--score-noise {own.score_noise} is not positive and finite. HINT: use --score-noise 20")
    return TrialCount.with_mean(_eta(own.private_selection), own.trials)


def _select(own: argparse.Namespace, config: Any, base: Any, space: Any, objectives: Any, count: Any) -> int:
    from ..tuning.private import BestTrial, PrivateSelection, select, write_selection
    from ..tuning.search import Search
    from ..tuning.storage import locked

    if len(objectives) > 1 or objectives[0].metric is None:
        raise ValueError("--private-selection chooses by one score. HINT: use --objective accuracy, with one epsilon.")
    selection = PrivateSelection(count, objectives[0], own.score_noise)
    if problems := selection.problems(base, space, own.sampler):
        raise ValueError("--private-selection: " + "; ".join(problems))
    ledgers = selection.ledgers(config, space)
    private = own.out / "private"
    path = own.storage or private / "study.sqlite"
    stated = [count.eta, count.gamma, own.score_noise]
    identity = _identity(own, config, space, objectives, selection=stated)
    private.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(path):
        study = _open(own, path, identity, [objectives[0].direction], None)
        search = Search(study, config, space, objectives)
        search.take_back_interrupted()
        _say("searching; how many trials there are, and their scores, stay secret")
        best = BestTrial(private / "best.pt")
        try:
            select(search, selection, best, base.experiment.datamodule, ledgers)
        except KeyboardInterrupt:
            _say("interrupted; nothing is released before the last trial. Continue with the same command")
            return 130
        epsilon = write_selection(own.out, search, selection, best, own.config, base.plan.delta, ledgers)
    _say(f"epsilon {upper_text(epsilon)} at delta {upper_text(base.plan.delta)}, training and choice together")
    _say(f"{own.out / 'selection.md'}")
    return 0


def _eta(text: str) -> float:
    from ..tuning.selection import NAMES

    try:
        eta = NAMES[text] if text in NAMES else float(text)
    except ValueError:
        eta = math.nan
    if not (math.isfinite(eta) and eta > -1):
        raise ValueError(
            f"--private-selection {text} is not a distribution. HINT: use {', '.join(NAMES)}, or eta above -1."
        )
    return eta


def validation_kind(data: Any) -> str:
    """Returns which rows the scores are from: private (held out of the training rows), test, or published."""
    if data.validation_fraction > 0:
        return "private"
    return "test" if data.val_dataloader().dataset is data.test_dataloader().dataset else "published"


def _say(line: str) -> None:
    show(f"{line}\n")
