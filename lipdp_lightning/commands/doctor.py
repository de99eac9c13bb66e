"""Implements ``lipdp doctor``: examines a new machine on one page, each line of which passes or says what to do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..report.show import show

_FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--run-dir", default="runs", metavar="FOLDER", help="folder that runs are written to (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Prints the page or the JSON; returns 0 if every line passes, and 1 otherwise."""
    import torch

    from .. import __version__
    from ..doctor.finding import examine

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lines = [(name, examine(check)) for name, check in checks(device, Path(args.run_dir))]
    passed = all(finding.passed for _, finding in lines)
    if args.json:
        content: dict[str, Any] = {
            "format": _FORMAT, "lipdp": __version__, "device": str(device), "passed": passed,
            "lines": [
                {"name": name, "passed": f.passed, "text": f.text, "hint": f.hint, "numbers": f.numbers}
                for name, f in lines
            ],
        }  # fmt: skip
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return 0 if passed else 1
    wide = max(len(name) for name, _ in lines)
    page = [f"lipdp {__version__} on {device}"]
    for name, finding in lines:
        page.append(f"{'ok  ' if finding.passed else 'FAIL'} {name:<{wide}}  {finding.text}")
        page += [] if finding.passed else [f"     {'':<{wide}}  HINT: {finding.hint}"]
    failed = sum(not finding.passed for _, finding in lines)
    if passed and device.type == "cpu" and torch.cuda.is_available():
        page.append("this was the CPU: --device cuda looks at the GPU")
    page.append("every line passes" if passed else f"{failed} of {len(lines)} lines fail")
    show("\n".join(page) + "\n")
    return 0 if passed else 1


def checks(device: Any, folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Returns the subjects of the page; those that need the device only where it is there."""
    import torch

    from ..doctor import device as on_device
    from ..doctor import machine

    found: list[tuple[str, Callable[[], Any]]] = [
        ("versions", machine.versions),
        ("device", partial(machine.the_device, device)),
        ("switches", machine.switches),
        ("disk", partial(machine.disk, folder)),
        ("Slurm", machine.slurm),
    ]
    if device.type == "cuda" and not torch.cuda.is_available():
        return found
    return [
        *found,
        ("processes", partial(machine.processes, device)),
        ("noise", partial(on_device.noise, device)),
        ("digest", partial(on_device.digest, device)),
        ("certificate", partial(on_device.certificate, device)),
        ("sums", partial(on_device.sums, device)),
        ("repeated step", partial(on_device.repeated_step, device)),
        ("waits", partial(on_device.waits, device)),
        ("time", partial(on_device.times, device)),
    ]
