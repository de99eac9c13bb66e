"""Provides the mechanisms of chapter 6 with the noise that the thesis states, and with the noise that its epsilon
needs.

`thesis` adds the thesis's Laplace noise, for the epsilon it claims. Its scales are larger than the least sound ones
(docs/curves.md), so the certified epsilon of the same noise is smaller than the claimed one:

| release | scale in the thesis | certified epsilon / claimed epsilon |
|---|---|---|
| distribution function | (L + 1) / epsilon | L / (L + 1) |
| ROC curve: two of epsilon / 2 each | 2 (L + 1) / epsilon | 2 ceil((L + 1) / 2) / (2 (L + 1)) |
| Hosmer-Lemeshow, half-open groups | (L + 9) / epsilon | (L + 4) / (L + 9) |

`laplace` and `factorization` are certified for the claimed epsilon itself. All are on public grids: with the ends that
the thesis reads off the data, no epsilon holds. The relation is replace-one throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipdp_lightning.studies.reproduce.entry import Row

if TYPE_CHECKING:
    from lipdp_lightning.curves import CurveMechanism, NoiseSource

THESIS, LAPLACE, FACTORIZATION = "thesis", "laplace", "factorization"
METHODS = (THESIS, LAPLACE, FACTORIZATION)


def certified_share(method: str, release: str, levels: int) -> float:
    """Returns certified over claimed epsilon, for `release` ecdf, roc or hosmer_lemeshow on 2^levels points."""
    if method != THESIS:
        return 1.0
    pair = 2 * ((levels + 2) // 2)
    shares = {
        "ecdf": levels / (levels + 1),
        "roc": pair / (2 * (levels + 1)),
        "hosmer_lemeshow": (levels + 4) / (levels + 9),
    }
    return shares[release]


def privacy(method: str, release: str, levels: int, claimed: float) -> Row:
    """Returns the columns that state a row's privacy."""
    certified = claimed * certified_share(method, release, levels)
    return {"certified_epsilon": certified, "claimed_epsilon": claimed, "delta": 0.0, "adjacency": "replace_one"}


def mechanism(method: str, release: str, levels: int, claimed: float) -> CurveMechanism:
    """Returns the mechanism of the distribution function or of the pair of an ROC curve."""
    from lipdp_lightning.curves import curve_mechanism

    name = FACTORIZATION if method == FACTORIZATION else LAPLACE
    epsilon = claimed * certified_share(method, release, levels)
    return curve_mechanism(name, levels, epsilon, curves=2 if release == "roc" else 1)


def fixed_noise(*parts: object) -> NoiseSource:
    """Returns noise that can be repeated, for published data only."""
    import hashlib

    from lipdp_lightning.curves import NoiseSource

    return NoiseSource(hashlib.sha256(repr(parts).encode()).digest()[:16])
