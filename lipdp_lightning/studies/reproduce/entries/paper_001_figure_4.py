"""Reproduces paper 001 figure 4: time and memory of a step beside other frameworks, against the batch size."""

from __future__ import annotations

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number

MODEL = "convnet-1.6m"
CONTENDERS = ("torch", "joint", "exact", "opacus", "ghost", "functorch", "jax")
BATCHES = (64, 256, 1024)
MEASURES = {"step": "step over the loop without privacy", "memory": "peak memory over the loop without privacy"}


def cells(options: Options) -> list[Cell]:
    sizes = BATCHES[:1] if options.quick else BATCHES
    return [{"batch": batch, "contender": name} for batch in sizes for name in CONTENDERS[1:]]


def run(cell: Cell) -> Row:
    """Measures one contender in turns with the loop without privacy, so that both meet the machine in one state."""
    from lipdp_lightning.bench.compare import Cell as Comparison
    from lipdp_lightning.bench.compare import Effort, compare

    compared = Comparison(MODEL, int(number(cell["batch"])), (str(cell["contender"]),))
    plain, own = compare([compared], Effort(parts=False))
    return {
        "status": own.reason or own.status, "step": own.ratio or float("nan"),
        "memory": own.memory_ratio or float("nan"), "seconds_without_privacy": plain.seconds or float("nan"),
        "certified_epsilon": None, "delta": None, "adjacency": None,
    }  # fmt: skip


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import label_axes, new_figure

    for measure, label in MEASURES.items():
        figure, axes = new_figure(f"{label[0].upper()}{label[1:]}, {MODEL}")
        for name in CONTENDERS[1:]:
            own = [row for row in rows if row["contender"] == name]
            axes.plot([number(r["batch"]) for r in own], [number(r[measure]) for r in own], "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        label_axes(axes, "batch size", "ratio")
        axes.legend(fontsize=7)
        out.figure(figure, f"{label} against the batch size", measure)
    return (
        "Each contender takes turns with a loop of plain torch on the same network, one thread each; ratios of steps "
        "are medians over the turns. They mean something only on a machine with nothing else to do. The step of jax is "
        "compiled as a whole by XLA, and its batches have one size. tensorflow-privacy 0.9.0 asks for dp-accounting "
        "0.4.3, numpy 1 and Python below 3.12, and cannot be installed beside this library."
    )


def _against(other: str) -> Claim:
    def ours(rows: Rows) -> str:
        found = {(number(row["batch"]), row["contender"]): row for row in rows}
        sizes = sorted({batch for batch, name in found if name == other and (batch, "joint") in found})
        if not sizes:
            return "not run"
        largest = sizes[-1]
        joint, theirs = found[largest, "joint"], found[largest, other]
        times, memory = (number(theirs[measure]) / number(joint[measure]) for measure in ("step", "memory"))
        return f"at batch {largest:g}: {other} takes {times:.2f} x the time, {memory:.2f} x the memory of joint scaling"

    published = "no gradients per example: faster and with less memory, above all for large batches (in words)"
    return Claim(f"Lip-DP-SGD against {other}", published, ours)


ENTRY = Entry(
    name="paper-001-figure-4",
    title="Time and memory of a step beside other frameworks",
    source="001 figure 4",
    expected_time="15 minutes on an idle machine",
    cells=cells,
    run=run,
    finish=finish,
    claims=tuple(_against(other) for other in ("opacus", "ghost", "functorch", "jax")),
)
