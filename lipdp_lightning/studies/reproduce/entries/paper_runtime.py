"""Reproduces paper 000 figure 2 and thesis figure 5.3.2: seconds per epoch against the batch size."""

from __future__ import annotations

from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

METHODS: dict[str, dict[str, Any]] = {
    "no privacy": {"method": "nonprivate"},
    "DP-SGD": {"method": "dpsgd_flat", "clip_norm": 1.0},
    "DP-SGD, ghost norms": {"method": "dpsgd_ghost", "clip_norm": 1.0},
    "joint scaling": {"scaling": "joint"},
}
BATCHES = (64, 256, 1024, 4096)
# micro-batches keep the memory bounded, as in the papers
PHYSICAL = 512
FILES = ("tabular/default_credit_card/UCI_Credit_Card.csv", "MNIST/raw/train-images-idx3-ubyte")
EPOCHS = 2


def cells(options: Options) -> list[Cell]:
    epochs = 1 if options.quick else EPOCHS
    return [
        {"data": data, "method": method, "batch": batch, "repetition": repetition, "epochs": epochs}
        for repetition in options.seed_range(3)
        for data in (("DefaultCredit",) if options.quick else ("DefaultCredit", "MNIST"))
        for batch in ((1024, 4096) if options.quick else BATCHES)
        for method in METHODS
    ]  # fmt: skip


def configuration(data: str, method: str, batch: int, epochs: float) -> dict[str, Any]:
    """Returns two layers for the table, and two convolutions and a head for the images."""
    if data == "MNIST":
        shape = {"input_shape": [1, 28, 28], "outputs": 10, "widths": [16, 32]}
        network, loss = {"class_path": "lipdp_lightning.models.ConvNet", "init_args": shape}, "cross_entropy"
        source: dict[str, Any] = {"class_path": "data_modules.MNIST"}
    else:
        shape = {"input_shape": [31], "outputs": 1, "hidden": [64]}
        network, loss = {"class_path": "lipdp_lightning.models.MLP", "init_args": shape}, "binary_cross_entropy"
        source = {"class_path": "data_modules.DefaultCredit", "init_args": {"validation_fraction": 0.2}}
    noise = {} if method == "no privacy" else {"noise_multiplier": 1.0}
    budget = {"delta": 1e-6, "epochs": epochs, "batch_size": batch, "physical_batch_size": min(batch, PHYSICAL)}
    return {
        "seed_everything": 0,
        "model": {"network": network, "loss": loss},
        "data": source,
        "privacy": {**budget, **noise, "accountant": "rdp", **METHODS[method]},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }


def run(cell: Cell) -> Row:
    """Times `epochs` epochs as the difference of a run with one more and a run of one, so that set-up cancels.

    A first run, which reads the data and loads libraries, is not counted.
    """
    from lipdp_lightning.experiment import run_once

    data, method, batch = str(cell["data"]), str(cell["method"]), int(number(cell["batch"]))
    epochs = int(number(cell["epochs"]))
    run_once(configuration(data, method, batch, 1))
    short = run_once(configuration(data, method, batch, 1))
    long = run_once(configuration(data, method, batch, 1 + epochs))
    return {
        "seconds_per_epoch": (long.seconds - short.seconds) / epochs,
        "steps_per_epoch": (long.steps - short.steps) / epochs,
        "certified_epsilon": long.epsilon,
        "delta": long.plan.delta,
        "adjacency": long.plan.adjacency,
    }


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import label_axes, new_figure

    for data in dict.fromkeys(str(row["data"]) for row in rows):
        figure, axes = new_figure(f"Seconds per epoch, {data}")
        for method in METHODS:
            line = [row for row in table(rows) if row["data"] == data and row["method"] == method]
            axes.plot(
                [number(r["batch"]) for r in line], [number(r["seconds_per_epoch"]) for r in line], "o-",
                markersize=3, label=method,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        label_axes(axes, "expected batch size", "seconds per epoch")
        axes.legend(fontsize=7)
        out.figure(figure, f"seconds per epoch against the batch size on {data}", data.lower())
    return (
        f"Each number is of one thread of the machine that ran it, with micro-batches of at most {PHYSICAL} rows; only "
        "ratios of one machine mean anything, and only if it had nothing else to do. The network on Default Credit has "
        "two layers, that on MNIST two convolutions and a head."
    )


def table(rows: Rows) -> list[Row]:
    return summarize(
        rows, ["data", "method", "batch", "certified_epsilon", "delta", "adjacency"], ["seconds_per_epoch"]
    )


def _ratio(data: str) -> Claim:
    def ours(rows: Rows) -> str:
        found = [row for row in rows if row["data"] == data]
        if not found:
            return "not run"
        largest = max(number(row["batch"]) for row in found)

        def seconds(method: str) -> float:
            times = [number(r["seconds_per_epoch"]) for r in found if r["batch"] == largest and r["method"] == method]
            return mean_and_deviation(times)[0]

        clipped, ghost, plain = (seconds(m) for m in ("DP-SGD", "DP-SGD, ghost norms", "no privacy"))
        joint = seconds("joint scaling")
        return (
            f"at batch {largest:g}: joint scaling {joint / plain:.2f} x no privacy, {joint / clipped:.2f} x DP-SGD, "
            f"{joint / ghost:.2f} x ghost norms"
        )

    published = "004: faster than DP-SGD, more so at large batches; 000: slightly slower (in words)"
    return Claim(f"Lip-DP-SGD against DP-SGD, {data}", published, ours)


ENTRY = Entry(
    name="paper-000-figure-2",
    title="Seconds per epoch against the batch size",
    source="000 figure 2, 004 figure 5.3.2",
    expected_time="30 minutes on an idle machine",
    cells=cells,
    run=run,
    finish=finish,
    claims=(_ratio("DefaultCredit"), _ratio("MNIST")),
    data=FILES,
    table=table,
)
