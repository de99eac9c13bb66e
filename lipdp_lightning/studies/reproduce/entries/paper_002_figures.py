"""Reproduces paper 002, figures 2 to 8: the three tests on trainings with and without the mistakes, on two networks."""

from __future__ import annotations

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number

# figure, test, clipping, noise, optimizer, whether the test should object
PER, MINI, NONE = "per example", "mini-batch", "none"
PANELS = (
    ("2", "bound", PER, "none", "sgd", False), ("2", "bound", NONE, "none", "sgd", True),
    ("3", "per example", PER, "none", "sgd", False), ("3", "per example", MINI, "none", "sgd", True),
    ("4", "calibration", PER, "calibrated", "sgd", False), ("4", "calibration", PER, "uncalibrated", "sgd", True),
    ("4", "calibration", PER, "none", "sgd", True), ("4", "calibration", MINI, "calibrated", "sgd", False),
    ("4", "calibration", MINI, "uncalibrated", "sgd", True), ("4", "calibration", MINI, "none", "sgd", True),
    ("5", "bound", PER, "none", "adam", False), ("5", "bound", NONE, "none", "adam", True),
    ("6", "per example", PER, "none", "adam", False), ("6", "per example", MINI, "none", "adam", True),
    ("7", "calibration", NONE, "calibrated", "sgd", False), ("7", "calibration", NONE, "uncalibrated", "sgd", True),
    ("7", "calibration", NONE, "none", "sgd", True), ("8", "calibration", PER, "calibrated", "adam", False),
    ("8", "calibration", PER, "uncalibrated", "adam", True), ("8", "calibration", PER, "none", "adam", True),
    ("8", "calibration", NONE, "calibrated", "adam", False), ("8", "calibration", NONE, "uncalibrated", "adam", True),
)  # fmt: skip
NETWORKS = ("transformer", "ResNet-20")


def cells(options: Options) -> list[Cell]:
    panels = PANELS[:4] if options.quick else PANELS
    return [
        {"figure": figure, "network": network, "test": test, "clipping": clip, "noise": noise, "optimizer": optimizer,
         "mistake": mistake, "largest_batch": 16 if options.quick else 64, "models": 2 if options.quick else 3}
        for network in (NETWORKS[:1] if options.quick else NETWORKS)
        for figure, test, clip, noise, optimizer, mistake in panels
    ]  # fmt: skip


def run(cell: Cell) -> Row:
    from lipdp_lightning.audit.blackbox import bound_finding, calibration_finding, per_example_finding
    from lipdp_lightning.audit.blackbox.black_box import HyperParameters, Optimizer
    from lipdp_lightning.audit.blackbox.bound_tests import SIZES
    from lipdp_lightning.audit.blackbox.user_script import wrapped
    from lipdp_lightning.studies.debugging.opacus_script import training
    from lipdp_lightning.studies.debugging.small_networks import Transformer, images, resnet_20, tokens

    build, inputs = (resnet_20, images) if cell["network"] == "ResNet-20" else (Transformer, tokens)
    function = training(str(cell["clipping"]), str(cell["noise"]))
    implementation = wrapped(str(cell["network"]), function, build, inputs, "cross_entropy")
    optimizer: Optimizer = "sgd" if cell["optimizer"] == "sgd" else "adam"
    hyper = HyperParameters(1.0, learning_rate=0.1 if optimizer == "sgd" else 0.01, optimizer=optimizer)
    if cell["test"] == "bound":
        found = bound_finding(implementation, hyper)
    elif cell["test"] == "per example":
        found = per_example_finding(implementation, hyper, [s for s in SIZES if s <= number(cell["largest_batch"])])
    else:
        found = calibration_finding(implementation, hyper, 1e-4, models=int(number(cell["models"])), values=6)
    points = found.plots[0].curves[0]
    return {
        "objects": found.violated,
        "p_value": found.values.get("slope_p", found.p_value),
        "x": " ".join(f"{v:.5g}" for v in points.x),
        "y": " ".join(f"{v:.5g}" for v in points.y),
        "certified_epsilon": None, "delta": None, "adjacency": None,
    }  # fmt: skip


def finish(rows: Rows, out: Output) -> str:
    from matplotlib.figure import Figure

    for network in dict.fromkeys(str(row["network"]) for row in rows):
        own = [row for row in rows if row["network"] == network]
        figures = list(dict.fromkeys(str(row["figure"]) for row in own))
        drawn = Figure(figsize=(9, 2.6 * len(figures)), layout="constrained")
        for axes, name in zip(drawn.subplots(len(figures), 1, squeeze=False)[:, 0], figures, strict=True):
            for row in (row for row in own if str(row["figure"]) == name):
                x, y = ([float(v) for v in str(row[c]).split()] for c in ("x", "y"))
                axes.plot(x, y, "o", markersize=3, label=f"clipping {row['clipping']}, noise {row['noise']}")
            axes.set_title(f"Figure {name}: {row_test(own, name)}", fontsize=9)
            if row_test(own, name).startswith("bound"):
                axes.set_xscale("log")
            axes.legend(fontsize=6)
        out.figure(drawn, f"the tests of paper 002 on {network}, one panel for each of its figures", network.lower())
    missed = [row for row in rows if row["mistake"] and not row["objects"]]
    false = [row for row in rows if not row["mistake"] and row["objects"]]
    return (
        f"Of {sum(bool(r['mistake']) for r in rows)} trainings with a mistake the tests object to "
        f"{sum(bool(r['mistake'] and r['objects']) for r in rows)}, and of {sum(not r['mistake'] for r in rows)} "
        f"without one "
        f"to {len(false)}. {_named('Not noticed', missed)}{_named('Objected to without a mistake', false)}The "
        f"networks are "
        "ResNet-20 at four channels and a transformer with one layer, on made-up images and tokens, where the "
        "paper has "
        "ResNet-20, WideResNet-50 and BERT on CIFAR-10, ImageNet and SST2."
    )


def row_test(rows: Rows, figure: str) -> str:
    """Returns the test and optimizer of a figure."""
    row = next(row for row in rows if str(row["figure"]) == figure)
    return f"{row['test']}, {row['optimizer']}"


def _named(head: str, rows: Rows) -> str:
    if not rows:
        return ""
    parts = [f"figure {r['figure']}, {r['network']}, clipping {r['clipping']}, noise {r['noise']}" for r in rows]
    return f"{head}: {'; '.join(parts)}. "


def table(rows: Rows) -> Rows:
    return [
        {name: value for name, value in row.items() if name not in ("x", "y", "largest_batch", "models")}
        for row in rows
    ]


def _largest_p(rows: Rows) -> str:
    found = [number(r["p_value"]) for r in rows if r["test"] == "per example" and r["clipping"] == PER]
    return f"{max(found):.2g}"


def _least_p(rows: Rows) -> str:
    found = [number(r["p_value"]) for r in rows if r["test"] == "per example" and r["clipping"] == MINI]
    return f"{min(found):.2g}"


ENTRY = Entry(
    name="paper-002-figures",
    title="Three tests for bugs of DP-SGD",
    source="002 figures 2 to 8",
    expected_time="20 minutes",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(
        Claim("largest p-value of figures 3 and 6, clipping of examples", "below 0.01", _largest_p),
        Claim("smallest p-value of figures 3 and 6, clipping of mini-batches", "above 0.99", _least_p),
    ),
)
