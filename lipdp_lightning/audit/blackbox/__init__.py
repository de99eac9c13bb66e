"""The tests of paper 002 over any training function, and the same idea for bounds in place of clipping."""

from .adapted import additivity_finding, black_box_depth_finding
from .calibration import calibration_finding
from .clipping import bound_finding, per_example_finding
from .heuristics import choose_bound, choose_noise
from .interface import Checkpoint, Data, HyperParameters, Implementation
from .opacus_training import opacus_implementation
from .ours import our_implementation
from .suite import black_box_findings, black_box_questions

__all__ = [
    "Checkpoint", "Data", "HyperParameters", "Implementation", "additivity_finding", "black_box_depth_finding",
    "black_box_findings", "black_box_questions", "bound_finding", "calibration_finding", "choose_bound", "choose_noise",
    "opacus_implementation", "our_implementation", "per_example_finding",
]  # fmt: skip
