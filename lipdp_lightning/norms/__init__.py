"""Upper bounds on the norms of operators.

=============  =====================================================================================
dense          matrices: Gram iteration, eigenvalues, and a close norm by one float32 product
cholesky       largest eigenvalues, proved by Cholesky factorisations
conv           convolutions: fast, tight, size-free and exact bounds
geometry       which pixels a convolution reads, how often (kappa), and the size of its output
operators      dense and convolution operators as values, and where rules get their norms from
strips         how far a weight moved, by strips of its rows
follow         norms of weights that change from step to step
=============  =====================================================================================
"""

from .conv import conv_norm
from .dense import close_norm, dense_norm, gram_norm
from .follow import Follower
from .geometry import coverage, kappa, output_size
from .operators import Convolution, Dense, NormSource, Operator

__all__ = [
    "Convolution",
    "Dense",
    "Follower",
    "NormSource",
    "Operator",
    "close_norm",
    "conv_norm",
    "coverage",
    "dense_norm",
    "gram_norm",
    "kappa",
    "output_size",
]
