"""Implements ``lipdp predict``: writes a model's predictions to a CSV or NPZ file."""

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
        description="Write the predictions of a run's last checkpoint, or of a file of lipdp export, for new rows in a "
        "table, or for test rows or validation rows. Classes are written as numbers, with the declared names beside. "
        "Averaged weights and a temperature are used as in lipdp test. Other options override keys of the stored "
        "configuration: --data and --data.init_args name other rows.",
    )
    parser.add_argument("--run_dir", "--run-dir", help="directory of a run")
    parser.add_argument("--release", help="file that lipdp export has written")
    parser.add_argument("--output", required=True, help="file to write, .csv or .npz; must not exist")
    parser.add_argument(
        "--table", help="CSV or Parquet file of new rows with the columns of the schema; no label is needed, or read"
    )
    parser.add_argument("--rows", choices=("test", "validation"), help="rows, if no --table is given (default: test)")
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
    if own.table is not None and own.rows is not None:
        problems.append("--table and --rows name different rows. HINT: give one of the two.")
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
    what = f"rows of {own.table}" if own.table is not None else f"{own.rows or 'test'} rows"
    show(f"{target}: {len(columns['row'])} {what}, {', '.join(columns)}\n")
    if own.table is None:
        show(f"{'computed on':<22}{SOURCES['validation']}\n")
    return 0


def _from_run(own: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from .test import prepared, stored_experiment

    directory, experiment = stored_experiment(own.run_dir, own.trust_config, rest)
    prepared(experiment, directory)
    return _columns(experiment.model, experiment.datamodule, own)


def _from_release(own: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    from ..release import load_release

    release = load_release(own.release)
    data = release.data(rest, trust_config=own.trust_config)
    return _columns(release.module(trust_config=own.trust_config), data, own)


def _columns(module: Any, data: Any, own: argparse.Namespace) -> dict[str, Any]:
    from ..experiment.predicted_rows import predicted_rows, predicted_table

    return (
        predicted_rows(module, data, own.rows or "test")
        if own.table is None
        else predicted_table(module, data, own.table)
    )


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
