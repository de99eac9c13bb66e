"""Upper bounds on the norms of operators.

=============  =====================================================================================
operators      operators as values, and where rules get their norms from
dense          matrices: eigenvalues of Gram matrices, also proved by Cholesky factorisations
conv           convolutions: fast, tight and exact bounds; which pixels they read, how often (kappa)
strips         how far a weight moved, by strips of its rows
follow         norms of weights that change from step to step
=============  =====================================================================================
"""

from .conv import Convolution, conv_norm, coverage, kappa, output_size
from .dense import Dense, dense_norm
from .follow import Follower
from .operators import NormSource, Operator

__all__ = [
    "Convolution", "Dense", "Follower", "NormSource", "Operator", "conv_norm", "coverage", "dense_norm", "kappa",
    "output_size",
]  # fmt: skip
