"""The tests of paper 002 over any training function, and the same idea for bounds in place of clipping."""

from .adapted import additivity_finding, black_box_depth_finding
from .black_box import Checkpoint, Data, HyperParameters, Implementation
from .black_box_suite import black_box_findings, black_box_questions
from .bound_tests import bound_finding, per_example_finding
from .heuristics import choose_bound, choose_noise
from .noise_proportion import calibration_finding
from .opacus_training import opacus_implementation
from .ours import our_implementation

__all__ = [
    "Checkpoint", "Data", "HyperParameters", "Implementation", "additivity_finding", "black_box_depth_finding",
    "black_box_findings", "black_box_questions", "bound_finding", "calibration_finding", "choose_bound", "choose_noise",
    "opacus_implementation", "our_implementation", "per_example_finding",
]  # fmt: skip
