"""``lipdp export``: a release checkpoint with weights, certificate and privacy report, and nothing secret."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

RELEASED_KEYS = ("format", "state_dict", "plan", "certificate", "privacy_report", "config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run_dir", required=True, help="a run directory of lipdp fit")
    parser.add_argument("--output", required=True, help="the file to write; must not exist")


def run(args: argparse.Namespace) -> int:
    source, target = Path(args.run_dir), Path(args.output)
    release = release_of(source, target)
    _write(release, target)
    report = release["privacy_report"]
    epsilon = "no epsilon is guaranteed" if report["epsilon"] is None else f"epsilon {report['epsilon']:.4g}"
    sys.stdout.write(f"{target}: {len(release['state_dict'])} tensors, {epsilon} at delta {report['delta']:g}\n")
    return 0


def release_of(source: Path, target: Path) -> dict[str, Any]:
    """What may be published of a run: an allow-list, so that new private state is never released by default."""
    import torch

    from ..training.run_directory import RunDirectory

    directory = RunDirectory(source)
    report_file = source / "privacy_report.json"
    missing = [str(f) for f in (directory.checkpoint, report_file, source / "config.yaml") if not f.exists()]
    problems = [f"{file} is missing. HINT: export a run that lipdp fit has finished or stopped." for file in missing]
    if target.exists():
        problems.append(f"{target} exists. HINT: name a new file.")
    if not target.parent.is_dir():
        problems.append(f"{target.parent} is not a directory. HINT: create it first.")
    if problems:
        raise ValueError(" ".join(problems))
    checkpoint = torch.load(directory.checkpoint, map_location="cpu", weights_only=False)
    report = json.loads(report_file.read_text())
    prefix = "network."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    return {
        "format": 1,
        "state_dict": weights,
        "plan": json.loads((source / "plan.json").read_text()),
        "certificate": report["groups"],
        "privacy_report": report,
        "config": (source / "config.yaml").read_text(),
    }


def _write(release: dict[str, Any], target: Path) -> None:
    import torch

    assert set(release) == set(RELEASED_KEYS)
    temporary = target.with_suffix(target.suffix + ".part")
    try:
        torch.save(release, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
