"""Upper bounds on the norms of operators.

=============  =====================================================================================
operators      operators as values, and where rules get their norms from
dense          matrices: eigenvalues of Gram matrices, also proved by Cholesky factorisations
conv           convolutions: fast, tight and exact bounds
geometry       which pixels a convolution reads, how often (kappa), and the size of its output
strips         how far a weight moved, by strips of its rows
follow         norms of weights that change from step to step
=============  =====================================================================================
"""

from .conv import Convolution, conv_norm
from .dense import Dense, dense_norm
from .follow import Follower
from .geometry import coverage, kappa, output_size
from .operators import NormSource, Operator

__all__ = [
    "Convolution", "Dense", "Follower", "NormSource", "Operator", "conv_norm", "coverage", "dense_norm", "kappa",
    "output_size",
]  # fmt: skip
