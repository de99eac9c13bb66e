"""Attacks on certificates, and a table of what they found."""

from .attack import attack
from .ratios import AttackReport, Finding, GroupRatio, NodeRatio

__all__ = ["AttackReport", "Finding", "GroupRatio", "NodeRatio", "attack"]
