"""Computes curves of data that several parties hold: secure aggregation and function secret sharing
(docs/parties.md).
"""

from lipdp_lightning.studies.parties.additive import AdditiveSharing, TableSharing
from lipdp_lightning.studies.parties.curator import TrustedCurator
from lipdp_lightning.studies.parties.function_sharing import FunctionSharing
from lipdp_lightning.studies.parties.kernel_sums import Histogram, ThresholdCounts, VectorSum
from lipdp_lightning.studies.parties.one_process import run_in_memory
from lipdp_lightning.studies.parties.process_session import ProcessSession
from lipdp_lightning.studies.parties.secure_aggregation import PartyLost, ProtocolError, ServerLost, TamperedMessage
from lipdp_lightning.studies.parties.shamir import ShamirSharing

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
