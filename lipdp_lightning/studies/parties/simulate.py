"""Implements ``lipdp curves simulate``: what each protocol sends, and the figures of 004, section 6.6.7.

Figure 6.6.6(a) varies the number of thresholds |B|, 6.6.6(b) the number of servers m; here the number of parties n and
the levels L of the grid vary as well. The lengths of messages depend on these public numbers only, so they are measured
on made-up records: for each configuration the messages of a few parties are made, measured and multiplied out to n
parties; and one session of each protocol is run between processes over loopback sockets, whose count must agree.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lipdp_lightning.privacy.keys import new_secret
from lipdp_lightning.report.atomic import write_all_atomically
from lipdp_lightning.report.figure_style import label_axes, legend, new_figure
from lipdp_lightning.report.show import show
from lipdp_lightning.studies.parties import (
    AdditiveSharing,
    FunctionSharing,
    ProcessSession,
    ShamirSharing,
    TableSharing,
    ThresholdCounts,
    TrustedCurator,
)
from lipdp_lightning.studies.parties.costs import count_session, modelled_bits
from lipdp_lightning.studies.parties.one_process import new_session
from lipdp_lightning.studies.parties.secure_aggregation import SecureAggregation, ShareRandomness

BANK_RECORDS = 45211  # parties in the thesis's experiment: rows of the Bank data
MODEL = "model of section 6.4"
MEASURED = "measured"
_SAMPLE = 4  # parties whose messages are measured
_TABLE_LEVELS = 14  # larger tables are not run
Make = Callable[[int], SecureAggregation]


@dataclass(frozen=True)
class Method:
    """A protocol, and how thresholds are asked: all at once, or one round of all parties for each (section 6.4.1)."""

    name: str
    make: Make
    rounds: bool = False
    only_servers: int | None = None


METHODS = (
    Method("fss", lambda servers: FunctionSharing(), only_servers=2),
    Method("table", TableSharing),
    Method("secure aggregation, a round per threshold", AdditiveSharing, rounds=True),
    Method("secure aggregation, one round", AdditiveSharing),
    Method("secure aggregation, one round, seeds", lambda servers: AdditiveSharing(servers, seeded=True)),
    Method("shamir, one round", lambda servers: ShamirSharing(servers, servers // 2 + 1)),
    Method("curator", lambda servers: TrustedCurator(), only_servers=1),
)


@dataclass(frozen=True)
class Cost:
    """The bits sent by everyone, as one row. Handshakes are apart, since links may be kept open for further
    sessions.
    """

    figure: str
    method: str
    source: str
    parties: int
    servers: int
    thresholds: int
    levels: int
    message_bits: int
    protocol_bits: int
    handshake_bits: int


def measure(figure: str, method: Method, parties: int, servers: int, thresholds: int, levels: int) -> Cost:
    """Makes the messages of a few parties, measures them, and counts the session's traffic for all."""
    protocol = method.make(servers)
    asked = 1 if method.rounds else thresholds
    points = tuple(np.linspace(0, (1 << levels) - 1, asked).astype(int).tolist())
    statistic = ThresholdCounts(levels, points)
    sample = np.stack([np.linspace(0, (1 << levels) - 1, _SAMPLE).astype(np.int64), np.ones(_SAMPLE, np.int64)], axis=1)
    messages = protocol.share(statistic, sample, ShareRandomness(new_secret(), new_session()))
    lengths = [rows.shape[1] for rows in messages]
    assert lengths == [protocol.message_bytes(server, statistic) for server in range(protocol.servers)]
    longest = max(lengths)
    traffic = count_session(protocol, statistic, parties, asked)
    rounds = thresholds if method.rounds else 1
    return Cost(
        figure, method.name, MEASURED, parties, protocol.servers, thresholds, levels,
        8 * longest, 8 * rounds * traffic.protocol, 8 * traffic.handshake,
    )  # fmt: skip


def model_rows(figure: str, parties: int, servers: int, thresholds: int, levels: int, key_bits: int) -> list[Cost]:
    """Returns the thesis's leading terms, with our key's length; for m > 2 servers they assume m keys of
    that length.
    """
    bits = modelled_bits(parties, servers, thresholds, key_bits)
    shape = (parties, servers, thresholds, levels)
    return [Cost(figure, f"{name}, {MODEL}", MODEL, *shape, key_bits, total, 0) for name, total in bits.items()]


def session_counts(processes: int, levels: int = 8) -> list[dict[str, Any]]:
    """Runs one session per protocol between processes, counted on the sockets, beside the same session counted in
    memory.
    """
    statistic = ThresholdCounts(levels, (0, 1 << (levels - 1)))
    records = np.stack([np.arange(processes) % (1 << levels), np.ones(processes, np.int64)], axis=1)
    rows = []
    for method in METHODS:
        protocol = method.make(method.only_servers or 2)
        with ProcessSession(protocol, statistic, records, epsilon=1.0, seconds=60) as session:
            session.query()
        expected = count_session(protocol, statistic, processes, len(statistic.thresholds))
        counted = (session.traffic.protocol, session.traffic.handshake)
        rows.append(
            {
                "protocol": method.name,
                "sockets_bytes": counted[0],
                "memory_bytes": expected.protocol,
                "handshake_bytes": counted[1],
                "agree": counted == (expected.protocol, expected.handshake),
            }
        )
    return rows


def sweep(parties: int, servers: int, thresholds: int, levels: int, axes: dict[str, Sequence[int]]) -> list[Cost]:
    """Returns all rows: each axis varies one number and keeps the others."""
    rows = []
    base = {"parties": parties, "servers": servers, "thresholds": thresholds, "levels": levels}
    for axis, values in axes.items():
        for value in values:
            at = {**base, axis: value}
            if at["thresholds"] > 1 << at["levels"]:
                continue
            for method in METHODS:
                wrong_servers = method.only_servers not in (None, at["servers"], 1)
                if not wrong_servers and (method.name != "table" or at["levels"] <= _TABLE_LEVELS):
                    rows.append(measure(axis, method, **at))
            key = measure(axis, METHODS[0], **at).message_bits
            rows.extend(model_rows(axis, **at, key_bits=key))
    return rows


_FILES = {
    "thresholds": ("figure-6.6.6a", "thresholds |B|"),
    "servers": ("figure-6.6.6b", "servers m"),
    "parties": ("parties", "parties n"),
    "levels": ("levels", "bits of the domain"),
}


def plot(rows: Iterable[Cost], axis: str) -> Figure:
    """Plots bits against one number: measured lines and points, and the thesis's model dashed."""
    figure, axes = new_figure(f"Communication by {_FILES[axis][1]}", height=4.6)
    lines: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if row.figure == axis:
            lines.setdefault(row.method, []).append((getattr(row, axis), row.protocol_bits))
    colours = matplotlib.colormaps["tab10"]
    for number, (name, points) in enumerate(sorted(lines.items())):
        style: dict[str, Any] = (
            {"linestyle": "--", "marker": ""} if MODEL in name else {"linestyle": "-", "marker": "o"}
        )
        axes.plot(*zip(*points, strict=True), label=name, color=colours(number), markersize=3, linewidth=1.2, **style)
    axes.set_yscale("log")
    if axis != "servers":
        axes.set_xscale("log")
    label_axes(axes, _FILES[axis][1], "bits sent by all")
    legend(axes, columns=1)
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "lipdp"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _csv(rows: Sequence[Cost]) -> str:
    names = list(asdict(rows[0]))
    lines = [",".join(names)]
    for row in rows:
        values = asdict(row).values()
        lines.append(",".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values))
    return "\n".join(lines) + "\n"


def simulate(
    output: str | Path,
    *,
    parties: int = BANK_RECORDS,
    servers: int = 2,
    thresholds: int = 100,
    levels: int = 12,
    axes: dict[str, Sequence[int]] | None = None,
    processes: int = 3,
) -> list[Path]:
    """Writes costs.csv, sessions.json and a figure per axis to a folder; all of them or none.

    Args:
        output: the folder.
        parties, servers, thresholds, levels: the numbers that are kept while another varies.
        axes: values per axis ("thresholds", "servers", "parties", "levels").
        processes: parties of the sessions between processes; 0 leaves these sessions out.
    """
    chosen = axes or default_axes(servers, thresholds, levels)
    _check(parties, servers, thresholds, levels, chosen, processes)
    sessions = session_counts(processes) if processes else []
    wrong = [row["protocol"] for row in sessions if not row["agree"]]
    if wrong:
        raise ValueError(
            f"the bytes on the sockets of {', '.join(wrong)} are not those counted in memory.\nHINT: report it."
        )
    rows = sweep(parties, servers, thresholds, levels, chosen)
    contents = {"costs.csv": _csv(rows), "sessions.json": json.dumps(sessions, indent=1) + "\n"}
    for axis in chosen:
        contents[f"{_FILES[axis][0]}.svg"] = _svg(plot(rows, axis))
    return list(write_all_atomically(output, contents).values())


def default_axes(servers: int, thresholds: int, levels: int) -> dict[str, Sequence[int]]:
    return {
        "thresholds": [b for b in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if b <= 1 << levels],
        "servers": [2, 3, 4, 5, 6, 8, 10],
        "parties": [10, 100, 1000, 10_000, 100_000],
        "levels": [b for b in (4, 8, 12, 16, 24, 32) if thresholds <= 1 << b],
    }


def _check(
    parties: int, servers: int, thresholds: int, levels: int, axes: dict[str, Sequence[int]], processes: int
) -> None:
    limits = {"parties": (1, 10**9), "servers": (2, 64), "thresholds": (1, 10_000), "levels": (1, 32)}
    given = {"parties": [parties], "servers": [servers], "thresholds": [thresholds], "levels": [levels]}
    problems = [f"{name} is not an axis." for name in axes if name not in limits]
    for name, (low, high) in limits.items():
        wrong = [value for value in [*given[name], *axes.get(name, [])] if not low <= value <= high]
        problems += [f"{name} {value} is not in {low} .. {high}." for value in wrong]
    if thresholds > 1 << min(levels, 32):
        problems.append(f"a grid of 2^{levels} points has no {thresholds} thresholds.")
    if not 0 <= processes <= 8:
        problems.append(f"{processes} processes are not in 0 .. 8.")
    if problems:
        raise ValueError(
            "\n".join([*problems, "HINT: lipdp curves simulate --help lists the options and their defaults."])
        )


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 2,3,5") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for costs.csv and the figures")
    parser.add_argument(
        "--parties", type=int, default=BANK_RECORDS, help=f"number of data owners (default {BANK_RECORDS})"
    )
    parser.add_argument("--servers", type=int, default=2, help="number of servers (default 2)")
    parser.add_argument("--thresholds", type=int, default=100, help="number of points to ask for (default 100)")
    parser.add_argument("--levels", type=int, default=12, help="the grid has 2^LEVELS points (default 12)")
    for axis in _FILES:
        parser.add_argument(
            f"--vary-{axis}", type=_integers, metavar="N,N,..", help="values on the axis of this figure"
        )
    parser.add_argument(
        "--processes",
        type=int,
        default=3,
        help="number of parties of the sessions over sockets (default 3; 0 for none)",
    )


def run(args: argparse.Namespace) -> int:
    axes = default_axes(args.servers, args.thresholds, min(max(args.levels, 1), 32))
    axes |= {axis: getattr(args, f"vary_{axis}") for axis in _FILES if getattr(args, f"vary_{axis}")}
    paths = simulate(
        args.output,
        parties=args.parties,
        servers=args.servers,
        thresholds=args.thresholds,
        levels=args.levels,
        axes=axes,
        processes=args.processes,
    )
    show("".join(f"{path}\n" for path in paths))
    return 0
