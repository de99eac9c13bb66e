"""Reproduces 000 figures 1 and 4, 004 figure 5.3.1 and 001 figure 5 with trained networks, at one epsilon on MNIST."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

EPSILON, DELTA, EPOCHS, BATCH = 3.0, 1e-5, 8.0, 2048
MODELS = "lipdp_lightning.models"
IMAGE: dict[str, Any] = {"input_shape": [1, 28, 28], "outputs": 10}
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "ConvNet, 83k": {"class_path": f"{MODELS}.PublishedConvNet", "init_args": IMAGE | {"name": "mnist_83k"}},
    "thin VGG": {"class_path": f"{MODELS}.ShallowVGG", "init_args": IMAGE | {"widths": [8, 16, 32]}},
    "thin ResNet": {"class_path": f"{MODELS}.ResNet", "init_args": IMAGE | {"widths": [8, 16]}},
    "thin Mixer": {"class_path": f"{MODELS}.MLPMixer", "init_args": IMAGE | {"patch_size": 7, "width": 32, "depth": 1}},
}
# privacy settings and Adam's rate, chosen once and not searched; `printed` are those without a certificate
ARMS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "no privacy": ({"method": "nonprivate", "max_norm": None}, 0.002),
    "DP-SGD": ({"method": "dpsgd_ghost", "clip_norm": 1.0, "max_norm": None}, 0.002),
    "exact norms": ({"scaling": "exact", "allocation": "global", "radius": 1.0, "max_norm": None}, 0.002),
    "bounds, joint, loss_clip": ({"scaling": "joint", "loss_clip": 0.3, "max_norm": 1.0}, 0.002),
    "bounds, layerwise": ({"scaling": "layerwise", "max_norm": 1.0}, 0.002),
    "Lip-DP-SGD of 000": ({"scaling": "worst_case", "max_norm": 1.0}, 0.002),
    "Lip-DP-SGD of 004, printed": ({"scaling": "batch_max", "max_norm": 1.0, "allow_noncertified": True}, 0.002),
    "Fix-Lip": ({"scaling": "worst_case", "max_norm": 1.0, "projection": "fixed"}, 0.002),
}
PRINTED = "Lip-DP-SGD of 004, printed"


def cells(options: Options) -> list[Cell]:
    return [
        {"network": network, "groups": groups, "arm": arm, "seed": seed, "epochs": 0.1 if options.quick else EPOCHS}
        for seed in options.seed_range(3)
        for network in (list(NETWORKS)[:1] if options.quick else NETWORKS)
        for groups in _normalised(network)
        for arm in (list(ARMS)[:3] if options.quick else ARMS)
    ]  # fmt: skip


def _normalised(network: str) -> tuple[int, ...]:
    """Returns the numbers of groups; the mixer has no normalisation here."""
    return (0,) if network == "thin Mixer" else (0, 4)


def configuration(network: str, groups: int, arm: str, seed: int, epochs: float) -> dict[str, Any]:
    """Returns one training; the printed arm takes the noise multiplier of the certified ones."""
    chosen = NETWORKS[network]
    changed = {"norm_groups": groups} if groups else {}
    settings, rate = ARMS[arm]
    privacy: dict[str, Any] = {"delta": DELTA, "epochs": epochs, "batch_size": BATCH, "accountant": "pld"}
    if arm == PRINTED:
        privacy["noise_multiplier"] = _multiplier(epochs)
    elif arm != "no privacy" or epochs == EPOCHS:
        privacy["epsilon"] = EPSILON
    return {
        "seed_everything": seed,
        "model": {
            "network": {"class_path": chosen["class_path"], "init_args": chosen["init_args"] | changed},
            "loss": "cross_entropy", "input_bound": 1.0, "input_mode": "normalize",
        },
        "data": {"class_path": "data_modules.MNIST"},
        "privacy": privacy | dict(settings),
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": rate}},
        "trainer": {"accelerator": "cpu", "devices": 1},
    }  # fmt: skip


def _multiplier(epochs: float) -> float:
    from lipdp_lightning.budget.calibrate import calibrate_noise, steps_for_epochs

    rate = BATCH / 60_000
    return calibrate_noise(EPSILON, DELTA, rate, steps_for_epochs(epochs, 60_000, BATCH))[0]


def run(cell: Cell) -> Row:
    from lipdp_lightning.experiment import run_once

    network, arm, seed = str(cell["network"]), str(cell["arm"]), int(number(cell["seed"]))
    config = configuration(network, int(number(cell["groups"])), arm, seed, number(cell["epochs"]))
    secret = hashlib.sha256(f"{network}, {cell['groups']}, {seed}".encode()).digest()[:16]
    found = run_once(config, secret=secret)
    return {
        "accuracy": found.score,
        "steps": found.steps,
        "certified_epsilon": found.epsilon,
        "claimed_epsilon": EPSILON if arm == PRINTED else None,
        "delta": found.plan.delta,
        "adjacency": found.plan.adjacency,
    }


def _mean(rows: Rows, **where: Any) -> float | None:
    found = [number(row["accuracy"]) for row in rows if all(row[name] == value for name, value in where.items())]
    return mean_and_deviation(found)[0] if found else None


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.report.figure_style import label_axes, new_figure

    figure, axes = new_figure("Accuracy on the test images of MNIST", height=4.5)
    places = [(network, groups) for network in NETWORKS for groups in _normalised(network)]
    for index, (network, groups) in enumerate(places):
        label: str | None = f"{network}{', normalised' if groups else ''}"
        for height, arm in enumerate(ARMS):
            mean = _mean(rows, network=network, groups=groups, arm=arm)
            if mean is not None:
                axes.plot([mean], [height], "os^Dv<>"[index], color=f"C{index}", fillstyle="none", label=label)
                label = None
    axes.set_yticks(range(len(ARMS)), list(ARMS), fontsize=7)
    label_axes(axes, "accuracy", "")
    axes.legend(fontsize=7)
    out.figure(figure, "accuracy of every arm and network at one epsilon")
    behind = [
        f"{network}{', group-normalised' if groups else ''}: {arm} {100 * mean:.1f} % (DP-SGD {100 * clipped:.1f} %)"
        for network, groups in places
        for arm in list(ARMS)[2:]
        if (mean := _mean(rows, network=network, groups=groups, arm=arm)) is not None
        and (clipped := _mean(rows, network=network, groups=groups, arm="DP-SGD")) is not None
        and mean < clipped
    ]
    return (
        f"Epsilon {upper_text(EPSILON)} at delta {DELTA:g} for add/remove, {EPOCHS:g} epochs of batches of {BATCH} "
        "expected rows, Adam; one "
        f"setting for each arm, chosen beforehand and not searched. Behind DP-SGD on the same network: "
        f"{'; '.join(behind) or 'none'}. The printed algorithm of 004 divides by a maximum over the private batch "
        f"and has "
        "no epsilon; it has the noise multiplier of the others. Group normalisation has 4 groups and the floor 0.5."
    )


def table(rows: Rows) -> Rows:
    by = ["network", "groups", "arm", "certified_epsilon", "claimed_epsilon", "delta", "adjacency"]
    return summarize(rows, by, ["accuracy"])


def _ours(rows: Rows) -> str:
    clipped = _mean(rows, network="ConvNet, 83k", groups=0, arm="DP-SGD")
    found = _mean(rows, network="ConvNet, 83k", groups=0, arm="bounds, layerwise")
    return (
        f"{100 * found:.1f} % against {100 * clipped:.1f} %" if found is not None and clipped is not None else "not run"
    )


ENTRY = Entry(
    name="paper-000-networks",
    title="Trained networks on MNIST",
    source="000 figures 1 and 4, 004 figure 5.3.1, 001 figure 5",
    expected_time="8 hours",
    cells=cells,
    run=run,
    finish=finish,
    table=table,
    claims=(Claim("Lip-DP-SGD (sound) against DP-SGD, 83k network", "comparable or superior (in words)", _ours),),
    data=tuple(
        f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ),
)
