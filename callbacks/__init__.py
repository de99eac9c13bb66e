"""Callbacks that watch, save and report a private run."""

from lipdp_lightning.callbacks.accountant import PrivacyAccountant
from lipdp_lightning.callbacks.augmentation_multiplicity import AugmentationMultiplicity
from lipdp_lightning.callbacks.calibration_metrics import CalibrationMetrics
from lipdp_lightning.callbacks.gradient_noise import GradientNoiseMonitor
from lipdp_lightning.callbacks.parameter_averaging import ParameterAveraging
from lipdp_lightning.callbacks.preemption import Preempted, Preemption
from lipdp_lightning.callbacks.privacy_report import PrivacyReport
from lipdp_lightning.callbacks.private_curves import PrivateValidationCurves
from lipdp_lightning.callbacks.progress import PrivateProgressBar
from lipdp_lightning.callbacks.resume_checkpoint import ResumeCheckpoint
from lipdp_lightning.callbacks.run_files import RunFiles
from lipdp_lightning.callbacks.temperature_scaling import TemperatureScaling

if __name__ != "lipdp_lightning.callbacks":
    raise ImportError(
        f"{__name__} is a folder of lipdp_lightning's checkout, and its package is lipdp_lightning.callbacks. "
        "HINT: from lipdp_lightning.callbacks import ...; a configuration may leave lipdp_lightning out."
    )

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
