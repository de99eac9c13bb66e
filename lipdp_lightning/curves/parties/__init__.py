"""Computes curves of data that several parties hold: secure aggregation and function secret sharing
(docs/parties.md).
"""

from lipdp_lightning.curves.parties.additive import AdditiveSharing, TableSharing
from lipdp_lightning.curves.parties.curator import TrustedCurator
from lipdp_lightning.curves.parties.function_sharing import FunctionSharing
from lipdp_lightning.curves.parties.interface import PartyLost, ProtocolError, ServerLost, TamperedMessage
from lipdp_lightning.curves.parties.memory import run_in_memory
from lipdp_lightning.curves.parties.processes import ProcessSession
from lipdp_lightning.curves.parties.shamir import ShamirSharing
from lipdp_lightning.curves.parties.statistics import Histogram, ThresholdCounts, VectorSum

__all__ = [
    "AdditiveSharing",
    "FunctionSharing",
    "Histogram",
    "PartyLost",
    "ProcessSession",
    "ProtocolError",
    "ServerLost",
    "ShamirSharing",
    "TableSharing",
    "TamperedMessage",
    "ThresholdCounts",
    "TrustedCurator",
    "VectorSum",
    "run_in_memory",
]
