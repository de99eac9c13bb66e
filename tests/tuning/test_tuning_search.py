"""``lipdp tune`` as a user runs it: results, resuming, failures, costs, selection and refusals."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.cli import main
from lipdp_lightning.training import PrivateStrategy
from lipdp_lightning.tuning.search import events_of
from lipdp_lightning.tuning.space import flat_keys, read_space
from lipdp_lightning.tuning.storage import make_sampler, open_study

CONFIG: dict[str, Any] = {
    "model": {
        "network": {
            "class_path": "lipdp_lightning.models.MLP",
            "init_args": {"input_shape": [30], "outputs": 1, "hidden": [4]},
        },
        "loss": "binary_cross_entropy",
    },
    "data": {"class_path": "data_modules.EmbeddedBreastCancer"},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "steps": 2, "batch_size": 100, "accountant": "rdp"},
    "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    "trainer": {"accelerator": "cpu", "devices": 1},
}
SPACE = {
    "privacy.noise_multiplier": {"low": 1.0, "high": 9.0, "log": True},
    "optimizer.init_args.lr": {"low": 0.001, "high": 0.1, "log": True},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return file


def space_file(folder: Path, content: Any) -> Path:
    file = folder / "space.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def tune(config: Path, out: Path, *options: Any) -> int:
    return main(["tune", "--config", str(config), "--out", str(out), *map(str, options)])


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


def study_of(file: Path) -> optuna.Study:
    return optuna.load_study(study_name="lipdp", storage=f"sqlite:///{file}")


def test_a_search_leaves_tables_a_plot_and_configurations_and_goes_on(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    out, space = tmp_path / "out", space_file(tmp_path, SPACE)
    assert tune(config, out, "--space", space, "--trials", 2) == 0
    first = rows(out / "trials.csv")
    assert tune(config, out, "--space", space, "--trials", 4) == 0
    trials = rows(out / "trials.csv")
    assert trials[:2] == first and len(trials) == 4  # finished trials are not repeated
    assert len({t["optimizer.init_args.lr"] for t in trials}) == 4  # nor are their settings
    points = {t["trial"]: (float(t["accuracy"]), float(t["epsilon"])) for t in trials}
    front = {
        n for n, (a, e) in points.items()
        if not any(b >= a and f <= e and (b, f) != (a, e) for b, f in points.values())
    }  # fmt: skip
    assert {t["trial"] for t in rows(out / "pareto.csv")} == front
    assert {f.name for f in (out / "pareto").iterdir()} == {f"trial-{n}.yaml" for n in front}
    one = yaml.safe_load((out / "pareto" / f"trial-{min(front)}.yaml").read_text())
    assert str(one["optimizer"]["init_args"]["lr"]) == next(
        t["optimizer.init_args.lr"] for t in trials if t["trial"] == min(front)
    )
    assert (out / "pareto.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (out / "pareto.svg").read_text()
    page = (out / "pareto.md").read_text()
    assert "4 trials finished, 0 failed" in page and "no number here covers" in page
    check_costs(out, page)
    sweep = yaml.safe_load((out / "sweep.yaml").read_text())
    assert sweep["command"][:4] == ["lipdp", "fit", "--config", str(config)] and sweep["command"][-1] == "${args}"
    assert sweep["parameters"]["optimizer.init_args.lr"] == {
        "distribution": "log_uniform_values", "min": 0.001, "max": 0.1,
    }  # fmt: skip
    assert "continuing after 2 trials" in capsys.readouterr().out


def check_costs(out: Path, page: str) -> None:
    """The epsilons of the page, computed again from the trials' own ledgers."""
    trials = study_of(out / "study.sqlite").trials
    ledgers = [events_of(t) for t in trials]
    summed = sum(epsilon_of("rdp", ledger, 1e-4).epsilon for ledger in ledgers)
    composed = epsilon_of("rdp", [e for ledger in ledgers for e in ledger], 1e-4).epsilon
    assert composed < summed
    assert f"epsilon {math.ceil(composed * 1e3) / 1e3:g} at delta 0.0001 by Renyi" in page
    assert f"epsilon {math.ceil(summed * 1e3) / 1e3:g} at delta {len(trials) * 1e-4:g} as plain sums" in page


@pytest.mark.slow
def test_failed_and_killed_trials_count_and_killed_ones_are_tried_again(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    space = space_file(
        tmp_path, {"privacy.batch_size": [50, 100000], "optimizer.init_args.lr": SPACE["optimizer.init_args.lr"]}
    )
    assert tune(config, out, "--space", space, "--trials", 4, "--sampler", "random", "--seed", 3) == 0
    trials = rows(out / "trials.csv")
    failed = [t for t in trials if t["state"] == "fail"]
    assert len(trials) == 4 and 0 < len(failed) < 4
    assert all("exceeds dataset_size" in t["error"] and t["privacy.batch_size"] == "100000" for t in failed)
    study = study_of(out / "study.sqlite")
    kinds = optuna.distributions
    lost = study.ask({
        "privacy.batch_size": kinds.CategoricalDistribution([50, 100000]),
        "optimizer.init_args.lr": kinds.FloatDistribution(0.001, 0.1, log=True),
    })  # fmt: skip
    event = LedgerEntry("subsampled_gaussian", 0.9, 0.1, 3, "gradient")
    lost.set_user_attr("events", [vars(event)])
    assert tune(config, out, "--space", space, "--trials", 5, "--sampler", "random", "--seed", 3) == 0
    trials = rows(out / "trials.csv")
    assert len(trials) == 6 and trials[4]["error"] == "interrupted"
    assert trials[5]["optimizer.init_args.lr"] == trials[4]["optimizer.init_args.lr"]
    planned = [t for t in study_of(out / "study.sqlite").trials if events_of(t) is not None]
    assert f"All {len(planned)} trials together" in (out / "pareto.md").read_text()
    assert lost.number in {t.number for t in planned}


def test_a_key_stroke_ends_the_search_and_the_trial_it_cut_off_is_accounted(
    config: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after one step of the second trial: that step was released."""
    out, space = tmp_path / "out", space_file(tmp_path, SPACE)
    step, taken = PrivateStrategy.optimizer_step, []

    def steps_and_then_interrupts(self: PrivateStrategy, *args: Any, **options: Any) -> Any:
        taken.append(step(self, *args, **options))
        if len(taken) == 3:
            raise KeyboardInterrupt
        return taken[-1]

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(PrivateStrategy, "optimizer_step", steps_and_then_interrupts)
        assert tune(config, out, "--space", space, "--trials", 3) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "counts as failed" in capsys.readouterr().out
    trials = rows(out / "trials.csv")
    assert [t["error"] for t in trials] == ["", "interrupted"]
    assert "All 2 trials together" in (out / "pareto.md").read_text()
    assert tune(config, out, "--space", space, "--trials", 2) == 0
    again = rows(out / "trials.csv")
    assert len(again) == 3 and again[2]["optimizer.init_args.lr"] == trials[1]["optimizer.init_args.lr"]


@pytest.mark.slow
def test_the_default_space_and_a_single_objective(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tune(config, out, "--trials", 2, "--objective", "loss", "--privacy.method", "dpsgd_flat") == 0
    trials = rows(out / "trials.csv")
    searched = {"privacy.noise_multiplier", "optimizer.init_args.lr", "privacy.batch_size", "privacy.clip_norm"}
    assert searched <= set(trials[0])
    assert len(rows(out / "pareto.csv")) == 1
    assert "--privacy.method=dpsgd_flat" in yaml.safe_load((out / "sweep.yaml").read_text())["command"]


@pytest.mark.slow
def test_a_method_without_a_guarantee_has_no_epsilon_to_minimise(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    space = space_file(tmp_path, {"privacy.method": ["nonprivate"]})
    assert tune(config, out, "--space", space, "--trials", 1) == 1
    assert "infinite" in rows(out / "trials.csv")[0]["error"]
    assert "no finite epsilon" in (out / "pareto.md").read_text()


@pytest.mark.slow
def test_botorch(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--space", space_file(tmp_path, SPACE), "--trials", 3, "--sampler", "botorch"]
    assert tune(config, out, *options) == 0
    assert len(rows(out / "trials.csv")) == 3  # two at random, and one that BoTorch chose


# ---- bad input


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"privacy.clipnorm": [1.0]}, "privacy.clipnorm is not a key of the configuration. HINT: privacy.clip_norm"),
        ({}, "is empty"), ("", "is empty"), ("a: [1", "not YAML"), ([1], "is empty"),
        ({"privacy.batch_size": []}, "no values"), ({"privacy.batch_size": [1, 1]}, "no values, or one twice"),
        ({"privacy.batch_size": {"low": 5}}, "neither a range nor a list"),
        ({"privacy.batch_size": {"low": 5, "high": 1}}, "neither a range nor a list"),
        ("optimizer.init_args.lr: {low: 1e-3, high: 0.1}", "write 0.001"),
        ({"optimizer.init_args.lr": {"low": 0, "high": 1, "log": True}}, "neither a range nor a list"),
        ({"privacy.delta": [1e-4, 1e-5]}, "not be comparable"), ({"trainer.max_steps": [1, 2]}, "not be comparable"),
        ({"privacy.cotangent_clip": [{"a": 1}]}, "a number, a text"),
        ({"privacy.foo": [1], "model.bar": [2]}, "model.bar is not a key"),
    ],
)  # fmt: skip
def test_spaces_that_make_no_sense(tmp_path: Path, space: Any, reason: str) -> None:
    known = flat_keys(CONFIG) | {"privacy.clip_norm": 1.0, "privacy.cotangent_clip": None, "trainer.max_steps": None}
    with pytest.raises(ValueError) as caught:
        read_space(space_file(tmp_path, space), known)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_space_that_makes_no_sense_is_one_line(config: Path, tmp_path: Path, capsys: Any) -> None:
    assert tune(config, tmp_path / "out", "--space", space_file(tmp_path, {"privacy.clipnorm": [1.0]})) == 2
    said = capsys.readouterr().err
    assert "privacy.clipnorm is not a key of the configuration. HINT: privacy.clip_norm" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--trials", "0"], "--trials 0"), (["--sampler", "grid"], "invalid choice"),
        (["--objective", "accuracy,mae"], "mae is not measured on a binary"),
        (["--objective", "epsilon"], "epsilon alone"), (["--objective", "f1"], "'f1' is not one of"),
        (["--privacy.method", "other"], "method"), (["--privacy.batch_size"], "not an option with a value"),
        (["--data.init_args.validation_fraction", "0"], "no validation rows"),
        (["--score-noise", "3"], "belong to --private-selection"),
        (["--private-selection", "geometric"], "needs a score that is private"),
        (["--private-selection", "uniform", "--score-noise", "3"], "is not a distribution"),
        (["--private-selection", "geometric", "--score-noise", "-3"], "not positive"),
        (["--private-selection", "geometric", "--score-noise", "3", "--objective", "accuracy,epsilon"], "by one score"),
        (["--private-selection", "geometric", "--score-noise", "3", "--objective", "loss"], "counts of correct rows"),
        (["--private-selection", "geometric", "--score-noise", "3", "--sampler", "tpe"], "must be independent"),
        (["--private-selection", "geometric", "--score-noise", "3", "--trials", "1"], "not above 1"),
        (["--private-selection", "geometric", "--public-validation", "--privacy.adjacency=replace_one"], "add/remove"),
        (["--private-selection", "geometric", "--public-validation", "--privacy.method", "nonprivate"], "no guarantee"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(config: Path, tmp_path: Path, capsys: Any, options: list[str], reason: str) -> None:
    assert tune(config, tmp_path / "out", *options) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_selection_refuses_what_stops_a_trial_early_or_spends_unknown_amounts(
    config: Path, tmp_path: Path, capsys: Any
) -> None:
    content = dict(CONFIG)
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "validation/loss"}}
    content["trainer"] = {**CONFIG["trainer"], "callbacks": [stopping]}
    config.write_text(yaml.safe_dump(content))
    options = ["--private-selection", "geometric", "--public-validation"]
    space = space_file(tmp_path, SPACE)
    assert tune(config, tmp_path / "out", *options, "--space", space) == 2
    said = capsys.readouterr().err
    assert "EarlyStopping decides by a score" in said and "privacy.noise_multiplier changes what a trial spends" in said


@pytest.mark.slow
def test_files_of_something_else(config: Path, tmp_path: Path, capsys: Any) -> None:
    space, other = space_file(tmp_path, SPACE), tmp_path / "other.sqlite"
    optuna.create_study(study_name="mine", storage=f"sqlite:///{other}")
    text = tmp_path / "text.sqlite"
    text.write_text("no database\n" * 100)
    assert tune(config, tmp_path / "out", "--space", space, "--trials", 1) == 0
    capsys.readouterr()
    cases = [
        (["--storage", other], "holds the studies mine"), (["--storage", text], "cannot be used"),
        (["--storage", tmp_path], "is a folder"), (["--objective", "accuracy,loss"], "another objective"),
        (["--privacy.steps", 3], "another configuration"),
    ]  # fmt: skip
    for options, reason in cases:
        assert tune(config, tmp_path / "out", "--space", space, "--trials", 2, *options) == 2
        said = capsys.readouterr().err
        assert reason in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["a?b=c", "{a}", "{SCHEMA_VERSION}", "%3F", "a b'\"", "#x", ":memory:", "Müller\n"])
def test_a_study_is_in_the_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The name is no address and no template."""
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    for _ in range(2):
        study = open_study(path, {"space": "1"}, ["maximize"], make_sampler("random", 0, 1))
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    assert len(study.trials) == 2 and os.listdir(tmp_path) == [name]
    assert path.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.slow
def test_two_processes_do_not_work_on_one_study(config: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import sys, pathlib; from lipdp_lightning.tuning.storage import locked\n"
        f"with locked(pathlib.Path({str(out / 'study.sqlite')!r})): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert tune(config, out, "--trials", 1) == 2
        assert "another process" in capsys.readouterr().err
    finally:
        holder.communicate("")


# ---- private selection


def test_only_the_best_is_released(config: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    rate = {"optimizer.init_args.lr": SPACE["optimizer.init_args.lr"], "privacy.batch_size": [50, 100]}
    space = space_file(tmp_path, rate)
    options = ["--space", space, "--trials", 4, "--private-selection", "geometric", "--score-noise", 4]
    assert tune(config, out, *options) == 0
    said = capsys.readouterr()
    assert "trial 0" not in said.out and "accuracy" not in said.out
    assert {f.name for f in out.iterdir()} == {"private", "selection.md", "best.yaml", "model.pt"}
    assert (out / "private").stat().st_mode & 0o077 == 0
    study = study_of(out / "private" / "study.sqlite")
    assert len(study.trials) == study.user_attrs["number of trials"]
    best = torch.load(out / "private" / "best.pt", weights_only=False)
    chosen = yaml.safe_load((out / "best.yaml").read_text())
    assert chosen["optimizer"]["init_args"]["lr"] == best["params"]["optimizer.init_args.lr"]
    assert best["params"] in [t.params for t in study.trials]
    model = torch.load(out / "model.pt", weights_only=True)
    assert set(model) == {"state_dict"}
    page = (out / "selection.md").read_text()
    assert "standard deviation 4" in page and all(str(t.values[0]) not in page for t in study.trials)
    claimed = float(page.split("epsilon = ")[1].split()[0])
    worst = max(epsilon_of("rdp", events_of(t), 1e-4).epsilon for t in study.trials)
    assert claimed > worst
    before = (out / "selection.md").read_text()
    assert tune(config, out, *options) == 0  # a second start trains nothing
    assert len(study_of(out / "private" / "study.sqlite").trials) == len(study.trials)
    assert (out / "selection.md").read_text() == before
    assert tune(config, out, *options[:3], 9, *options[4:]) == 2  # nor is another number of trials drawn
    assert "another selection" in capsys.readouterr().err


@pytest.mark.slow
def test_the_number_of_trials_and_the_settings_do_not_come_from_the_seed(config: Path, tmp_path: Path) -> None:
    """From a public seed, the settings of the best would tell how many trials came before it."""
    space = space_file(tmp_path, {"optimizer.init_args.lr": SPACE["optimizer.init_args.lr"]})
    options = ["--space", space, "--trials", 2, "--private-selection", "logarithmic", "--public-validation"]
    rates = set()
    for name in ("a", "b"):
        assert tune(config, tmp_path / name, *options, "--seed", 5) == 0
        study = study_of(tmp_path / name / "private" / "study.sqlite")
        rates.add(study.trials[0].params["optimizer.init_args.lr"])
    assert len(rates) == 2
