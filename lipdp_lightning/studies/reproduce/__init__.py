"""Reproduces the papers' tables and figures with certified epsilons (docs/reproduce.md).

An entry is a short module of `lipdp_lightning.studies.reproduce.entries`; nothing else has to know of it.
"""

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows, Value
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number, summarize

__all__ = [
    "Cell",
    "Claim",
    "Entry",
    "Options",
    "Output",
    "Row",
    "Rows",
    "Value",
    "mean_and_deviation",
    "number",
    "summarize",
]
