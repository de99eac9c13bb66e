"""Implements ``lipdp predict``: writes a model's outputs for the rows of a data module to a CSV or NPZ file."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_bytes_atomically
from .option_parser import OptionParser

SUFFIXES = (".csv", ".npz")


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="lipdp predict",
        description="Write the outputs of a run's last checkpoint, or of a file of lipdp export, for test rows or "
        "validation rows. Averaged weights and a temperature are used as in lipdp test. Other options override keys of "
        "the stored configuration: --data and --data.init_args name other rows, such as "
        "--data.init_args.heldout_path new.csv for a table with the columns of the schema, the label among them.",
    )
    parser.add_argument("--run_dir", "--run-dir", help="directory of a run")
    parser.add_argument("--release", help="file that lipdp export has written")
    parser.add_argument("--output", required=True, help="file to write, .csv or .npz; must not exist")
    parser.add_argument("--rows", choices=("test", "validation"), default="test", help="rows (default: test)")
    parser.add_argument(
        "--trust_config",
        "--trust-config",
        action="store_true",
        help="create what the configuration names even if it was made elsewhere and names foreign code",
    )
    return parser.parse_known_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Returns 0; neither the run directory nor the released file is changed."""
    own, rest = _split(arguments)
    target = Path(own.output)
    problems = []
    if (own.run_dir is None) == (own.release is None):
        problems.append("give either --run_dir or --release. HINT: lipdp predict --run_dir runs/mine --output out.csv")
    if target.suffix not in SUFFIXES:
        problems.append(f"--output {target} is neither .csv nor .npz. HINT: use --output predictions.csv")
    elif target.exists():
        problems.append(f"--output {target} exists. HINT: name a new file.")
    if problems:
        raise ValueError("\n".join(problems))
    from ..experiment.quiet import quiet
    from ..report.show import show
    from ..report.words import SOURCES

    with quiet():
        columns = _from_release(own, rest) if own.run_dir is None else _from_run(own, rest)
    content = _csv(columns) if target.suffix == ".csv" else _npz(columns)
    write_bytes_atomically(target, content)
    show(f"{target}: {len(columns['row'])} {own.rows} rows, {', '.join(columns)}\n")
    show(f"{'computed on':<22}{SOURCES['validation']}\n")
    return 0


def _from_run(own: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from .test import prepared, stored_experiment

    directory, experiment = stored_experiment(own.run_dir, own.trust_config, rest)
    prepared(experiment, directory)
    return _columns(experiment.model, experiment.datamodule, own.rows)


def _from_release(own: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from ..experiment.experiment import parse_experiment
    from ..experiment.foreign_code import known_code_only, refuse_projects
    from ..release import load_release

    release = load_release(own.release)
    refuse_projects(release.config, release.path)
    with known_code_only(release.config, release.path, trusted=own.trust_config):
        data = parse_experiment(["--config", release.config, *rest], None, "off").datamodule
    if release.statistics:
        data.use_statistics(dict(release.statistics))
    return _columns(release.module(trust_config=own.trust_config), data, own.rows)


def _columns(module: Any, data: Any, rows: str) -> dict[str, Any]:
    """Returns the columns of the file, by name: numbers of rows, targets, predictions and each class's probability."""
    from ..calibration.probabilities import log_probabilities
    from ..training.predictions import class_scores, predict_rows

    data.setup("test")
    loader = data.test_dataloader() if rows == "test" else data.val_dataloader()
    if not loader:
        raise ValueError(f"{type(data).__name__} has no {rows} rows of their own. HINT: use --rows test")
    outputs, targets, _ = predict_rows(module, data, loader)
    columns: dict[str, Any] = {"row": range(len(targets)), "target": targets.reshape(-1).numpy()}
    if module.task == "regression":
        return columns | {"prediction": outputs.reshape(-1).numpy()}
    shares = log_probabilities(class_scores(module, outputs), module.output_temperature).exp()
    columns["prediction"] = shares.argmax(dim=1).numpy()
    return columns | {f"probability_{index}": shares[:, index].numpy() for index in range(shares.shape[1])}


def _csv(columns: dict[str, Any]) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue().encode()


def _npz(columns: dict[str, Any]) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(values) for name, values in columns.items()}
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()
