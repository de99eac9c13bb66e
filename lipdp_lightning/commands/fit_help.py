"""Arranges the help of ``lipdp fit``: what a private run decides comes first, and Lightning's trainer last."""

from __future__ import annotations

import contextlib
import io
import re

FIRST = ("privacy", "model", "data", "optimizer", "lr_scheduler")
_SECTION = re.compile(r"^(?=\S.*:$)", re.MULTILINE)
_GROUP = re.compile(r"^  --(\w+)", re.MULTILINE)
# thousands of lines, which name every class that happens to be imported
_SUBCLASSES = re.compile(r",?\s+known subclasses:[^)]*\)")
_NAMES = """
Group trainer, about 400 lines, is that of lightning.Trainer: `lipdp fit --help-all`. A class of yours, or another one,
is named by its import path; --model.network.help CLASS lists the arguments of a class.
"""


def fit_help(everything: bool) -> str:
    """Returns the help of the experiment's options; with ``everything``, as jsonargparse writes it."""
    from ..experiment.experiment import parse_experiment

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        parse_experiment(["--help"], None, "off")
    return written.getvalue() if everything else arranged(written.getvalue())


def arranged(text: str) -> str:
    """Returns the sections of a help text that belong to a private run, without the usage and long lists of classes."""
    sections: dict[str, str] = {}
    for part in _SECTION.split(text)[1:]:
        found = _GROUP.search(part)
        name = found.group(1) if found else ""
        sections[name if name in FIRST or name == "trainer" else "other"] = part.rstrip()
    chosen = [sections[name] for name in (*FIRST, "other") if name in sections]
    return _SUBCLASSES.sub(")", "\n\n".join(chosen)) + "\n" + _NAMES
