"""Callbacks that watch, save and report a private run."""

from callbacks.accountant import PrivacyAccountant
from callbacks.augmentation_multiplicity import AugmentationMultiplicity
from callbacks.calibration_metrics import CalibrationMetrics
from callbacks.gradient_noise import GradientNoiseMonitor
from callbacks.parameter_averaging import ParameterAveraging
from callbacks.preemption import Preempted, Preemption
from callbacks.privacy_report import PrivacyReport
from callbacks.private_curves import PrivateValidationCurves
from callbacks.progress import PrivateProgressBar
from callbacks.resume_checkpoint import ResumeCheckpoint
from callbacks.run_files import RunFiles
from callbacks.temperature_scaling import TemperatureScaling

__all__ = [
    "AugmentationMultiplicity",
    "CalibrationMetrics",
    "GradientNoiseMonitor",
    "ParameterAveraging",
    "Preempted",
    "Preemption",
    "PrivacyAccountant",
    "PrivacyReport",
    "PrivateProgressBar",
    "PrivateValidationCurves",
    "ResumeCheckpoint",
    "RunFiles",
    "TemperatureScaling",
]
