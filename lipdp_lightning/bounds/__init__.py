"""Upper bounds, per parameter group, on what one example contributes to the gradient.

The spine, in the order of reading: ``certificate`` (the result), ``certifier`` (the walk forward),
``backward`` (the walk back), ``registry`` (rules, their arguments and results), ``rules.linear`` (one
rule), ``identity`` and ``rehearsal`` (checks that the network which trains is the one that was certified).

The appendices: ``graph`` (tracing), ``shapes`` (shapes, numbers made from them, constants), ``inplace`` (writes on
memory), ``reachable`` (what an identity compares), ``rounding``, ``losses``, and the other ``rules``.
"""

from .certificate import Certificate, GroupBound, NodeBound, UseBound
from .certifier import CertificationError, Certifier, certify
from .losses import Loss, as_loss
from .registry import Bound, Operation, ParameterUse, Unbounded, Value, refuse, rule

__all__ = [
    "Bound", "Certificate", "CertificationError", "Certifier", "GroupBound", "Loss", "NodeBound", "Operation",
    "ParameterUse", "Unbounded", "UseBound", "Value", "as_loss", "certify", "refuse", "rule",
]  # fmt: skip
