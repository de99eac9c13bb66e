"""Measures how far predicted probabilities can be trusted: sums that add up over processes, and their scores."""

from lipdp_lightning.calibration.coverage import CoverageScores, CoverageSums, ResidualModel
from lipdp_lightning.calibration.probabilities import check_labels, check_probabilities, log_probabilities
from lipdp_lightning.calibration.scores import ClassificationScores, Diagram, scores_of_sums
from lipdp_lightning.calibration.sums import CalibrationSums, binned_sums
from lipdp_lightning.calibration.temperature import fit_temperature, private_temperature

__all__ = [
    "CalibrationSums",
    "ClassificationScores",
    "CoverageScores",
    "CoverageSums",
    "Diagram",
    "ResidualModel",
    "binned_sums",
    "check_labels",
    "check_probabilities",
    "fit_temperature",
    "log_probabilities",
    "private_temperature",
    "scores_of_sums",
]
