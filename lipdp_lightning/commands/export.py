"""Implements ``lipdp export``: a release checkpoint with weights, certificate and privacy report, and
nothing secret.
"""

from __future__ import annotations

import argparse
import io
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from typing import Any

from ..files import write_bytes_atomically
from ..release import described
from ..report.show import show

RELEASED_KEYS = (
    "format", "state_dict", "weights", "temperature", "statistics", "plan", "certificate", "privacy_report", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run_dir", required=True, help="a run directory of lipdp fit")
    parser.add_argument("--output", required=True, help="the file to write; must not exist")


def run(args: argparse.Namespace) -> int:
    source, target = Path(args.run_dir), Path(args.output)
    release, secret = release_of(source, target)
    _write(release, target, secret)
    show(f"{target}: {described(release['state_dict'], release['weights'], release['privacy_report'])}\n")
    return 0


def release_of(source: Path, target: Path) -> tuple[dict[str, Any], bytes]:
    """Returns what may be published of a run, and the secret that may not.

    The first is built from an allow-list, so that new private state is never released by default.
    """
    from ..report.model import RunFacts
    from ..training.averaging import evaluated_state
    from ..training.checkpoint_files import read_checkpoint
    from ..training.checkpoints import STATISTICS
    from ..training.predictions import read_temperature
    from ..training.run_directory import RunDirectory

    directory = RunDirectory(source)
    record = directory.require()
    report_file, plan_file = source / "privacy_report.json", source / "plan.json"
    missing = [str(f) for f in (directory.checkpoint, report_file, plan_file, directory.config) if not f.exists()]
    problems = [f"{file} is missing. HINT: export a run that lipdp fit has finished or stopped." for file in missing]
    if target.exists():
        problems.append(f"{target} exists. HINT: name a new file.")
    if not target.parent.is_dir():
        problems.append(f"{target.parent} is not a directory. HINT: create it first.")
    if problems:
        raise ValueError("\n".join(problems))
    checkpoint = read_checkpoint(directory.checkpoint)
    if record.get("status") not in ("finished", "stopped") or record.get("steps") != checkpoint["global_step"]:
        raise ValueError(
            f"the run in {source} is {record.get('status', 'unknown')}, and its report is not of the checkpoint's step "
            f"{checkpoint['global_step']}. HINT: let it end, or continue it with lipdp fit and stop it with Ctrl-C."
        )
    report = directory.content(report_file.name)
    try:
        RunFacts.from_dict(report)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{report_file} cannot be read: {error}. HINT: restore it from a backup.") from error
    prefix = "network."
    state, weights = evaluated_state(checkpoint)
    if not any(name.startswith(prefix) for name in state):  # a project by privatize, under its own names
        prefix = ""
    return {
        "format": 1,
        "state_dict": {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)},
        "weights": weights,
        "temperature": float((read_temperature(source) or {}).get("temperature", 1.0)),
        "statistics": checkpoint.get(STATISTICS, {}),
        "plan": directory.content(plan_file.name),
        "certificate": report.get("averaged_groups") or report["groups"],
        "privacy_report": report,
        "config": directory.configuration(),
    }, checkpoint.get("lipdp", {}).get("secret", b"")


def traces(secret: bytes, content: bytes) -> list[str]:
    """Returns the forms in which a secret of at least eight bytes is in a file: as it is, in hexadecimal, or
    in base64.
    """
    if len(secret) < 8:
        return []
    # torch.save writes bytes in the second form
    as_text = secret.decode("latin-1").encode()
    forms = {"as bytes": [secret, as_text], "in hexadecimal": [secret.hex().encode(), secret.hex().upper().encode()]}
    # base64 of a longer text has three offsets; characters that depend on the neighbours are left out
    forms["in base64"] = [
        code(bytes(offset) + secret)[2 * offset : -4] for offset in range(3) for code in (b64encode, urlsafe_b64encode)
    ]
    forms["as a list of numbers"] = [", ".join(map(str, secret)).encode(), repr(secret)[2:-1].encode()]
    return [name for name, texts in forms.items() if any(text in content for text in texts)]


def _write(release: dict[str, Any], target: Path, secret: bytes) -> None:
    import torch

    assert set(release) == set(RELEASED_KEYS)
    buffer = io.BytesIO()
    torch.save(release, buffer)
    if found := traces(secret, buffer.getvalue()):
        raise ValueError(
            f"the run's secret is in what would be released, {' and '.join(found)}; nothing was written. "
            "HINT: look for it in config.yaml; a fixed_secret is an option for tests."
        )
    write_bytes_atomically(target, buffer.getvalue())
