"""Reproduces paper 003, section 6.3, with a small transformer trained from its first attention on, in place of BERT."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.calibrated import (
    SCORES,
    Setting,
    draw_curves,
    draw_reliability,
    mean_of,
    moments_of,
    panels,
    secret_of,
    select,
    trained,
)
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number, summarize

PLAIN, LOCAL, BOUNDS, OURS = "no privacy", "DP-AdamW, local", "ours, bounds alone", "ours, exact"
METHODS = (PLAIN, LOCAL, BOUNDS, OURS)
EPSILON, DELTA, STEPS, BATCH, SEEDS, QUICK_STEPS = 3.0, 1e-5, 60, 1024, 3, 2
LENGTH, VOCABULARY, WIDTH = 24, 4096, 64
LEXICON = "text/icwsm2014/vader_sentiment_lexicon.txt"
SETTINGS = {
    PLAIN: Setting({"method": "nonprivate"}, 0.003),
    LOCAL: Setting({"method": "dpsgd_ghost", "clipping": "local", "clip_norm": 1.0, "max_norm": None}, 0.003),
    BOUNDS: Setting({"scaling": "joint", "allocation": "global", "max_norm": 1.0}, 0.003),
    OURS: Setting({"radius": 20.0}, 0.003),
}


def save_lexicon(file: Path) -> None:
    """Saves rows of a quarter of a random direction and, along one direction for all, the word's published valence."""
    import torch

    from lipdp_lightning.data_modules.found_files import data_root, find_file, read_text
    from lipdp_lightning.data_modules.tokens import HashedTokens

    tokenizer, generator = HashedTokens(VOCABULARY), torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(VOCABULARY, WIDTH, generator=generator), dim=1)
    shared = torch.nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    valence = torch.zeros(VOCABULARY)
    found = find_file(data_root(None), LEXICON, "it is in the archive of the sentences")
    for line in read_text(found, "latin-1").splitlines():
        word, mean, *_ = line.split("\t")
        valence[tokenizer.number(word)] = float(mean) / 4
    torch.save(0.25 * rows + valence.unsqueeze(1) * shared, file)


def configuration(method: str, steps: int, seed: int, file: Path) -> dict[str, Any]:
    """Returns one training: a block of attention and dense layers, and the head, on frozen rows of words."""
    setting = SETTINGS[method]
    privacy: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA, "batch_size": BATCH, "accountant": "pld"}
    if steps != STEPS and method != PLAIN:
        privacy |= {"epsilon": None, "noise_multiplier": 1.0}
    network = {
        "input_shape": [LENGTH], "outputs": 3, "vocabulary": VOCABULARY, "width": WIDTH, "heads": 4, "hidden": 0,
        "position_share": 0.0,
        "file": str(file),
    }  # fmt: skip
    return {
        "seed_everything": seed,
        "model": {
            "network": {"class_path": "lipdp_lightning.models.Transformer", "init_args": network},
            "loss": "cross_entropy",
            "input_bound": 1e6,
        },
        "data": {
            "class_path": "data_modules.MovieTokens",
            "init_args": {
                "length": LENGTH, "test_fraction": 0.2, "validation_fraction": 0.0,
                "tokenizer": {
                    "class_path": "data_modules.HashedTokens", "init_args": {"vocabulary": VOCABULARY}
                },
            },
        },
        "privacy": privacy | {"steps": steps} | dict(setting.privacy),
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": setting.lr}},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }  # fmt: skip


def cells(options: Options) -> list[Cell]:
    steps = QUICK_STEPS if options.quick else STEPS
    return [{"method": m, "seed": seed, "steps": steps} for seed in options.seed_range(SEEDS) for m in METHODS]


def run(cell: Cell) -> Row:
    from lipdp_lightning.experiment import prepare

    method, steps, seed = str(cell["method"]), int(number(cell["steps"])), int(number(cell["seed"]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.pt"
        save_lexicon(file)
        prepared = prepare(configuration(method, steps, seed, file), secret=secret_of(cell))
        return {"lr": SETTINGS[method].lr, **trained(prepared, moments_of(steps, 8))}


def table(rows: Rows) -> list[Row]:
    by, shown = ["method", "lr", "certified_epsilon", "delta", "adjacency"], (*SCORES, "accuracy (sd)")
    return [
        {k: round(number(v), 4) if k in shown else v for k, v in row.items() if k in (*by, *shown, "runs")}
        for row in summarize(rows, by, SCORES)
    ]


def finish(rows: Rows, out: Output) -> str:
    figure, axes = panels(len(METHODS), "Reliability: bars observed, lines mean confidence")
    for place, method in zip(axes, METHODS, strict=True):
        first = select(rows, method=method)[0]
        draw_reliability(place, first["diagram"], f"{method}\nECE {100 * number(first['ece']):.1f} %")
    axes[0].set_ylabel("share that is right", fontsize=8)
    out.figure(figure, "reliability diagrams of four methods", "reliability")
    figure, axes = panels(3, "Along training (test rows)", height=3.0)
    for place, column, label in zip(axes, ("nll", "accuracy", "ece"), ("loss", "accuracy", "ECE"), strict=True):
        draw_curves(place, list(rows), f"curve_{column}", "method", label)
    axes[0].legend(fontsize=6)
    out.figure(figure, "loss, accuracy and ECE along training", "curves")
    weights = 4 * WIDTH * WIDTH + 3 * WIDTH + 3
    return (
        "This stands in for SNLI with the last encoder layer of BERT, which is not available: 10,605 sentences of film "
        "reviews in three classes, and a transformer with one block of attention with four heads, all of whose "
        f"{weights:,} weights are trained. The {VOCABULARY} rows of its embedding are frozen: a quarter of a random "
        "direction for each hashed word and, along one direction for all, its valence in the published lexicon of the "
        "same archive, which people rated word by word. A fifth of the rows, by a hash, is the test; epsilon "
        f"{upper_text(EPSILON)} at delta {DELTA:g}, PLD. "
        "The step size is one for all methods; it and the radii 1 and 20 were chosen after a few trainings on the same "
        "split, and the largest class alone is 47.5 % of the test. `data_modules.SNLITokens` reads SNLI itself."
    )


def _ours(column: str) -> Any:
    return lambda rows: ", ".join(f"{m} {100 * mean_of(select(rows, method=m), column):.1f}" for m in METHODS)


ENTRY = Entry(
    name="paper-003-transformer",
    title="Calibration of a transformer on text",
    source="003 section 6.3, figure 10, table 2",
    expected_time="4 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(
        Claim("accuracy in %, SNLI and BERT", "no privacy 85.4, local 74.1, mix-up 73.1", _ours("accuracy")),
        Claim("ECE in %, SNLI and BERT", "no privacy 13.0, local 22.0, mix-up 17.6", _ours("ece")),
    ),
    data=("text/icwsm2014/movieReviewSnippets_GroundTruth.txt", LEXICON),
)
