"""Reproduces paper 000, figure 3: the distance of the mean clipped gradient from the mean gradient along training."""

from __future__ import annotations

from typing import Any

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number, summarize

DATA = ("Dropout", "Adult")
FILES = ("tabular/students_dropout/data.csv", "tabular/adult/adult.data", "tabular/adult/adult.test")
ITERATIONS = (0, 10, 25, 50, 100, 200, 400)
INSTANCES, BATCH, RATE, HIDDEN = 500, 256, 0.01, 32


def cells(options: Options) -> list[Cell]:
    return [
        {"data": data, "iteration": iteration, "seed": seed}
        for data in DATA
        for iteration in (ITERATIONS[:3] if options.quick else ITERATIONS)
        for seed in options.seed_range(5)
    ]


def run(cell: Cell) -> Row:
    """Trains with clipping and without noise up to the iteration, then compares both gradients on fresh instances.

    The radius is the median gradient norm of the first batch: a public choice would do, but this one suits any table.
    """
    import torch
    from torch import nn

    from lipdp_lightning.models import MLP

    from .... import data_modules

    torch.manual_seed(int(number(cell["seed"])))
    options: dict[str, Any] = {"target": "dropout"} if cell["data"] == "Dropout" else {}
    module = getattr(data_modules, str(cell["data"]))(validation_fraction=0.0, **options)
    x, y = module.load_train()
    x, y = nn.functional.normalize(x), y.float()
    network = MLP(module.input_shape, 1, hidden=[HIDDEN])
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)

    def gradients(rows: torch.Tensor) -> torch.Tensor:
        """Returns one flat gradient per row."""
        from torch.func import functional_call, grad, vmap

        parameters = {name: p.detach() for name, p in network.named_parameters()}

        def loss(values: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logit = functional_call(network, values, (one.unsqueeze(0),)).reshape(())
            return nn.functional.binary_cross_entropy_with_logits(logit, target)

        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x[rows], y[rows])
        flat: torch.Tensor = torch.cat([value.flatten(1) for value in found.values()], dim=1)
        return flat

    first = gradients(torch.randint(len(x), (BATCH,)))
    radius = float(first.norm(dim=1).median())

    def clipped(found: torch.Tensor) -> torch.Tensor:
        return found * (radius / found.norm(dim=1, keepdim=True).clamp_min(radius))

    for _ in range(int(number(cell["iteration"]))):
        mean = clipped(gradients(torch.randint(len(x), (BATCH,)))).mean(0)
        parts = torch.split(mean, [parameter.numel() for parameter in network.parameters()])
        for parameter, part in zip(network.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    found = gradients(torch.randint(len(x), (INSTANCES,)))
    short = clipped(found)
    return {
        "clipping_error": float((found.mean(0) - short.mean(0)).norm()),
        "clipped_gradient": float(short.mean(0).norm()),
        "gradient": float(found.mean(0).norm()),
        "share_clipped": float((found.norm(dim=1) > radius).double().mean()),
        "radius": radius,
        # training without noise shows the gradients themselves
        "certified_epsilon": float("inf"),
        "delta": 0.0,
        "adjacency": "add_remove",
    }


def table(rows: Rows) -> list[Row]:
    by = ["data", "iteration", "certified_epsilon", "delta", "adjacency"]
    return summarize(rows, by, ["clipping_error", "clipped_gradient", "gradient", "share_clipped"])


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import label_axes, new_figure

    for data in DATA:
        line = [row for row in table(rows) if row["data"] == data]
        figure, axes = new_figure(f"Error of the clipped gradient, {data}")
        for column, label in (("clipping_error", "|g - clip(g)|"), ("clipped_gradient", "|clip(g)|")):
            places, heights = ([number(row[name]) for row in line] for name in ("iteration", column))
            errors = [number(row.get(f"{column} (sd)") or 0.0) for row in line]
            axes.errorbar(places, heights, yerr=errors, marker="o", markersize=4, capsize=2, label=label)
        label_axes(axes, "iteration", "norm of the mean")
        axes.legend()
        out.figure(figure, f"error and norm of the mean clipped gradient on {data}", data.lower())
    return (
        "A two-layer network is trained with per-example clipping, without noise; g and clip(g) are means over "
        f"{INSTANCES} instances. Scalings by public bounds have no such error: they change which examples count how "
        "much, by their inputs and not by their residuals."
    )


def _grows(data: str) -> Claim:
    def ours(rows: Rows) -> str:
        line = [row for row in table(rows) if row["data"] == data]
        shares = [number(row["clipping_error"]) / number(row["clipped_gradient"]) for row in (line[0], line[-1])]
        return f"error over clipped gradient: {shares[0]:.2f} at the start, {shares[1]:.2f} at the end"

    return Claim(data, "the error grows while the clipped gradient falls (in words)", ours)


ENTRY = Entry(
    name="paper-000-figure-3",
    title="Error of clipping along training",
    source="000 figure 3, 004 figure 5.3.3",
    expected_time="5 minutes",
    cells=cells,
    run=run,
    finish=finish,
    claims=tuple(_grows(data) for data in DATA),
    data=FILES,
    table=table,
)
