"""Reproduces paper 003, table 2 and figures 6 to 9: calibration of image classifiers at equal epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows, Value
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number, summarize

DATA = {"MNIST": 2.32, "FashionMNIST": 2.32, "CIFAR10": 1.96}  # epsilons of the paper, which has no Fashion-MNIST
NETWORKS: dict[str, list[int]] = {"linear": [], "hidden 64": [64]}
PLAIN, LOCAL, GLOBAL, MIXED, OURS = (
    "no privacy", "DP-SGD, local", "DP-SGD, global", "DP-SGD, mix-up", "ours, joint (default)",
)  # fmt: skip
METHODS = (PLAIN, LOCAL, GLOBAL, MIXED, OURS)
STEPS, BATCH, DELTA, SEEDS = 100, 4096, 1e-5, 2
QUICK_STEPS = 2


def _clip(radius: float, clipping: str = "local", **more: Any) -> dict[str, Any]:
    # dpsgd_ghost is dpsgd_flat, computed without gradients per example
    return {"method": "dpsgd_ghost", "clipping": clipping, "clip_norm": radius, **more}


_JOINT: dict[str, Any] = {"scaling": "joint", "allocation": "global"}
_BOUNDED = _JOINT | {"max_norm": 1.0}
_BARE: dict[str, Any] = {"method": "nonprivate"}
_SWITCH: dict[str, Any] = {"switch_at": 0.95, "switch_to": "global"}
# the most accurate over a small grid of step sizes, radii and temperatures, on a hashed tenth of the training rows;
# the mix-up has the step size of local clipping, and a radius that global clipping trains with
SETTINGS: dict[tuple[str, str, str], Setting] = {
    ("MNIST", "linear", PLAIN): Setting(_BARE, 0.1),
    ("MNIST", "linear", LOCAL): Setting(_clip(0.1), 0.3),
    ("MNIST", "linear", GLOBAL): Setting(_clip(1.42, "global"), 0.3),
    ("MNIST", "linear", MIXED): Setting(_clip(1.0, **_SWITCH), 0.3),
    ("MNIST", "linear", OURS): Setting(_JOINT, 0.3),
    ("MNIST", "hidden 64", PLAIN): Setting(_BARE, 0.03),
    ("MNIST", "hidden 64", LOCAL): Setting(_clip(3.0), 0.03),
    ("MNIST", "hidden 64", GLOBAL): Setting(_clip(4.0, "global"), 0.03),
    ("MNIST", "hidden 64", MIXED): Setting(_clip(4.0, **_SWITCH), 0.03),
    ("MNIST", "hidden 64", OURS): Setting(_BOUNDED, 0.01, 0.03),
    ("FashionMNIST", "linear", PLAIN): Setting(_BARE, 0.1),
    ("FashionMNIST", "linear", LOCAL): Setting(_clip(0.1), 0.3),
    ("FashionMNIST", "linear", GLOBAL): Setting(_clip(1.42, "global"), 0.1),
    ("FashionMNIST", "linear", MIXED): Setting(_clip(1.0, **_SWITCH), 0.3),
    ("FashionMNIST", "linear", OURS): Setting(_JOINT, 0.1),
    ("FashionMNIST", "hidden 64", PLAIN): Setting(_BARE, 0.03),
    ("FashionMNIST", "hidden 64", LOCAL): Setting(_clip(3.0), 0.03),
    ("FashionMNIST", "hidden 64", GLOBAL): Setting(_clip(8.0, "global"), 0.01),
    ("FashionMNIST", "hidden 64", MIXED): Setting(_clip(4.0, **_SWITCH), 0.03),
    ("FashionMNIST", "hidden 64", OURS): Setting(_BOUNDED, 0.01, 0.01),
    ("CIFAR10", "linear", PLAIN): Setting(_BARE, 0.1),
    ("CIFAR10", "linear", LOCAL): Setting(_clip(0.3), 0.1),
    ("CIFAR10", "linear", GLOBAL): Setting(_clip(1.42, "global"), 0.1),
    ("CIFAR10", "linear", MIXED): Setting(_clip(1.0, **_SWITCH), 0.1),
    ("CIFAR10", "linear", OURS): Setting(_JOINT, 0.1),
    ("CIFAR10", "hidden 64", PLAIN): Setting(_BARE, 0.01),
    ("CIFAR10", "hidden 64", LOCAL): Setting(_clip(3.0), 0.03),
    ("CIFAR10", "hidden 64", GLOBAL): Setting(_clip(4.0, "global"), 0.01),
    ("CIFAR10", "hidden 64", MIXED): Setting(_clip(4.0, **_SWITCH), 0.03),
    ("CIFAR10", "hidden 64", OURS): Setting(_BOUNDED, 0.01, 0.01),
}


def configuration(data: str, network: str, method: str, steps: int, seed: int) -> dict[str, Any]:
    """Returns the configuration of one training."""
    setting = SETTINGS[data, network, method]
    shape = [3, 32, 32] if data == "CIFAR10" else [1, 28, 28]
    gabor = {"class_path": "lipdp_lightning.features.Gabor", "init_args": {"input_shape": shape}}
    size = 1024 if data == "CIFAR10" else 784
    layers = {"input_shape": [size], "outputs": 10, "hidden": NETWORKS[network], "bias": False, "zero_init": True}
    privacy = {"epsilon": DATA[data], "delta": DELTA, "batch_size": BATCH, "accountant": "pld", "max_norm": None}
    if steps != STEPS and setting.privacy.get("method") != "nonprivate":
        privacy |= {"epsilon": None, "noise_multiplier": 1.0}
    return {
        "seed_everything": seed,
        "model": {
            "network": {"class_path": "lipdp_lightning.models.MLP", "init_args": layers},
            "loss": {
                "class_path": "lipdp_lightning.bounds.losses.CrossEntropy",
                "init_args": {"temperature": setting.temperature},
            },
            "input_mode": "normalize",
        },
        "data": {
            "class_path": "data_modules.Features",
            "init_args": {"data": {"class_path": f"data_modules.{data}"}, "extractor": gabor},
        },
        "privacy": privacy | {"steps": steps} | dict(setting.privacy),
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": setting.lr}},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }


def cells(options: Options) -> list[Cell]:
    return [
        {
            "data": data, "network": network, "method": method, "seed": seed,
            "steps": QUICK_STEPS if options.quick else STEPS,
        }
        for seed in options.seed_range(SEEDS)  # outermost, so that an interrupted run has rows of every method
        for data in DATA
        for network in NETWORKS
        for method in METHODS
    ]  # fmt: skip


def run(cell: Cell) -> Row:
    from lipdp_lightning.experiment import prepare

    data, network, method = str(cell["data"]), str(cell["network"]), str(cell["method"])
    steps, seed = int(number(cell["steps"])), int(number(cell["seed"]))
    setting = SETTINGS[data, network, method]
    prepared = prepare(configuration(data, network, method, steps, seed), secret=secret_of(cell))
    chosen = {
        "lr": setting.lr, "clip_norm": setting.privacy.get("clip_norm"), "temperature": setting.temperature,
    }  # fmt: skip
    return {**chosen, **trained(prepared, moments_of(steps))}


def table(rows: Rows) -> list[Row]:
    by = ["data", "network", "method", "lr", "clip_norm", "temperature", "certified_epsilon", "delta", "adjacency"]
    found: list[Row] = []
    for row in summarize(rows, by, SCORES):
        shown: dict[str, Value] = {
            k: round(number(v), 4) if k in SCORES else v for k, v in row.items() if not k.endswith("(sd)")
        }
        shown["ece (sd)"] = round(number(row.get("ece (sd)")), 4) if "ece (sd)" in row else None
        found.append(shown)
    return found


def finish(rows: Rows, out: Output) -> str:
    for data in dict.fromkeys(str(row["data"]) for row in rows):
        for network in dict.fromkeys(str(row["network"]) for row in rows):
            of_pair = select(rows, data=data, network=network)
            part = f"{data}-{network}".lower().replace(" ", "-")
            _figures(of_pair, f"{data}, {network}", part, out)
    lines = [verdict(rows, data, network) for data in DATA for network in NETWORKS]
    return (
        "Features are 16 fixed Gabor filters (784 numbers of norm 1; 1024 for CIFAR-10), then one layer or a hidden "
        f"layer of 64; Adam, {STEPS} steps, expected batch {BATCH}, delta 1e-5, PLD, ECE and MCE over 15 bins. These "
        "are not the paper's CNNs. The mix-up switches after 95 % of the steps. Step size, radius and temperature were "
        "the most accurate of a small grid on a tenth of the training rows; that search is not accounted for. With one "
        "layer and rows of norm 1 no gradient is longer than 1.42: global and local clipping with such a radius, and "
        "our default, are then one and the same method, and methods differ in how small a radius they were given. "
        "The claim that was to be checked is that at equal epsilon and within a point of accuracy our default has the "
        "lower ECE. " + " ".join(lines)
    )


def verdict(rows: Rows, data: str, network: str, point: float = 0.01) -> str:
    """States whether the claim holds for one data set and network."""
    ours, local = (select(rows, data=data, network=network, method=m) for m in (OURS, LOCAL))
    gap = mean_of(ours, "accuracy") - mean_of(local, "accuracy")
    mine, theirs = mean_of(ours, "ece"), mean_of(local, "ece")
    comparable = "" if abs(gap) <= point else ", so that accuracies are not within a point"
    holds = "lower" if mine < theirs else "not lower"
    return (
        f"{data}, {network}: accuracy {100 * gap:+.2f} points against local clipping{comparable}, ECE "
        f"{100 * mine:.2f} % against {100 * theirs:.2f} %: {holds}."
    )


def _figures(rows: Rows, title: str, part: str, out: Output) -> None:
    figure, axes = panels(len(METHODS), f"Reliability, {title}: bars observed, lines mean confidence")
    for place, method in zip(axes, METHODS, strict=True):
        first = select(rows, method=method)[0]
        draw_reliability(place, first["diagram"], f"{method}\nECE {100 * number(first['ece']):.1f} %")
    axes[0].set_ylabel("share that is right", fontsize=8)
    out.figure(figure, f"reliability diagrams of five methods, {title}", f"{part}-reliability")
    figure, axes = panels(3, f"Along training, {title} (test rows)", height=3.0)
    for place, column, label in zip(axes, ("nll", "accuracy", "ece"), ("loss", "accuracy", "ECE"), strict=True):
        draw_curves(place, rows, f"curve_{column}", "method", label)
    axes[0].legend(fontsize=6)
    out.figure(figure, f"loss, accuracy and ECE along training, {title}", f"{part}-curves")


def _ours(data: str, column: str) -> Callable[[Rows], str]:
    def values(rows: Rows) -> str:
        parts = []
        for network in NETWORKS:
            each = [(m, mean_of(select(rows, data=data, network=network, method=m), column)) for m in METHODS]
            shown = ", ".join(f"{m} {100 * v:.1f}" for m, v in each if not math.isnan(v))
            parts.append(f"{network}: {shown}")
        return "; ".join(parts)

    return values


ENTRY = Entry(
    name="paper-003-table-2",
    title="Calibration at equal epsilon",
    source="003 table 2 and figures 6 to 9",
    expected_time="10 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(
        Claim("MNIST, ECE in %", "no privacy 0.8, local 2.5, global 0.5", _ours("MNIST", "ece")),
        Claim("MNIST, MCE in %", "no privacy 21.1, local 50.2, global 22.8", _ours("MNIST", "mce")),
        Claim("MNIST, accuracy in %", "local 96, global 95", _ours("MNIST", "accuracy")),
        Claim("CIFAR-10, ECE in %", "no privacy 13.9, local 20.0, global 3.3", _ours("CIFAR10", "ece")),
        Claim("CIFAR-10, MCE in %", "no privacy 20.9, local 32.0, global 9.9", _ours("CIFAR10", "mce")),
        Claim("CIFAR-10, accuracy in %", "no privacy 61.3, local 47.6, global 43.5", _ours("CIFAR10", "accuracy")),
        Claim("Fashion-MNIST, ECE in %", "not in the paper", _ours("FashionMNIST", "ece")),
        Claim("Fashion-MNIST, accuracy in %", "not in the paper", _ours("FashionMNIST", "accuracy")),
    ),
    data=[
        f"{name}/raw/{part}-{kind}-ubyte"
        for name in ("MNIST", "FashionMNIST")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ],
)
