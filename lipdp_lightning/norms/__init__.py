"""Upper bounds on the norms of operators.

=============  =====================================================================================
dense          matrices: Gram iteration, eigenvalues, and a close norm by one float32 product
cholesky       largest eigenvalues, proved by Cholesky factorisations
conv           convolutions: fast, tight, size-free and exact bounds
geometry       which pixels a convolution reads, how often (kappa), and the size of its output
operators      dense and convolution operators as values
source         where rules get norms from; the plain source evaluates each anew
follow         norms of weights that change from step to step
=============  =====================================================================================
"""

from .conv import conv_norm, conv_norm_exact, conv_norm_fast, conv_norm_size_free, conv_norm_tight
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
    "conv_norm_exact",
    "conv_norm_fast",
    "conv_norm_size_free",
    "conv_norm_tight",
    "coverage",
    "dense_norm",
    "gram_norm",
    "kappa",
    "output_size",
]
