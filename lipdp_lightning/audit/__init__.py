"""Attacks certificates and prints what the attacks found."""

from .attack import attack
from .certificate_table import certificate_json, certificate_table
from .ratios import AttackReport, Finding, GroupRatio, NodeRatio
from .rules import RuleRatio, rule_ratios

__all__ = [
    "AttackReport", "Finding", "GroupRatio", "NodeRatio", "RuleRatio", "attack", "certificate_json",
    "certificate_table", "rule_ratios",
]  # fmt: skip
