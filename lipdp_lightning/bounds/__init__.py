"""Certified numbers: an upper bound, per parameter group, on what one example contributes to the gradient."""

from .certificate import Certificate, GroupBound, NodeBound, UseBound
from .certifier import CertificationError, Certifier, certify
from .losses import Loss, as_loss
from .registry import refuse, rule
from .values import Bound, Operation, ParameterUse, Unbounded, Value

__all__ = [
    "Bound", "Certificate", "CertificationError", "Certifier", "GroupBound", "Loss", "NodeBound", "Operation",
    "ParameterUse", "Unbounded", "UseBound", "Value", "as_loss", "certify", "refuse", "rule",
]  # fmt: skip
