"""Turns ordinary models into ones that can be certified.

``converter`` is the entry; ``substitutes`` is the table of what becomes of a module, ``floored_norms`` holds the
normalisations in it, ``chain`` finds the last modules of a model, ``head_trained`` trains them on the frozen rest,
``limited_norms`` scales weights down, and ``conversion_report`` says what was done.
"""

from .conversion_report import Change, ConversionReport
from .converter import Conversion, convert
from .floored_norms import FlooredNorm, RunningNorm
from .head_trained import HeadTrained

__all__ = ["Change", "Conversion", "ConversionReport", "FlooredNorm", "HeadTrained", "RunningNorm", "convert"]
