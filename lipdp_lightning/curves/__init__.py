"""Releases private curves: distribution functions, ROC, calibration and Hosmer-Lemeshow with noise (docs/curves.md)."""

from lipdp_lightning.curves.bands import Band, ecdf_band
from lipdp_lightning.curves.cells import Grid
from lipdp_lightning.curves.continual import ContinualSum
from lipdp_lightning.curves.discrete_noise import NoiseSource
from lipdp_lightning.curves.ecdf import PrivateECDF, private_ecdf
from lipdp_lightning.curves.hosmer_lemeshow import PrivateHosmerLemeshow, private_hosmer_lemeshow
from lipdp_lightning.curves.mechanism import CurveMechanism, curve_mechanism
from lipdp_lightning.curves.quantiles import PrivateHistogram, histogram, quantile
from lipdp_lightning.curves.range_finding import find_range
from lipdp_lightning.curves.releases import CurveRelease, ReleaseList
from lipdp_lightning.curves.reliability import PrivateReliability, private_reliability
from lipdp_lightning.curves.roc import PrivateROC, private_roc
from lipdp_lightning.curves.smooth import smooth

__all__ = [
    "Band",
    "ContinualSum",
    "CurveMechanism",
    "CurveRelease",
    "Grid",
    "NoiseSource",
    "PrivateECDF",
    "PrivateHistogram",
    "PrivateHosmerLemeshow",
    "PrivateROC",
    "PrivateReliability",
    "ReleaseList",
    "curve_mechanism",
    "ecdf_band",
    "find_range",
    "histogram",
    "private_ecdf",
    "private_hosmer_lemeshow",
    "private_reliability",
    "private_roc",
    "quantile",
    "smooth",
]
