"""Provides fixed feature extractors, which are computed once per example and never trained on private data."""

from .deskewed import Deskewed
from .extractor import FeatureExtractor
from .gabor import Gabor
from .mirrored import MirroredScattering
from .outer_products import OuterProducts
from .patches import Patches
from .scattering import Scattering
from .timm_backbone import TimmFeatures
from .token_embedding import TokenEmbedding
from .whitened import Whitened

__all__ = [
    "Deskewed", "FeatureExtractor", "Gabor", "MirroredScattering", "OuterProducts", "Patches", "Scattering",
    "TimmFeatures", "TokenEmbedding", "Whitened",
]  # fmt: skip
