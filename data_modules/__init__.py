"""Data sets for private training: one file per family, each class a `PrivateDataModule`.

Names are imported when they are first used, so importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipdp_lightning.data_modules.android import Android as Android
    from lipdp_lightning.data_modules.arrays import NpzArrays as NpzArrays
    from lipdp_lightning.data_modules.base import PrivateDataModule as PrivateDataModule
    from lipdp_lightning.data_modules.benchmark_tables import Adult as Adult
    from lipdp_lightning.data_modules.benchmark_tables import BreastCancer as BreastCancer
    from lipdp_lightning.data_modules.benchmark_tables import CaliforniaHousing as CaliforniaHousing
    from lipdp_lightning.data_modules.benchmark_tables import DefaultCredit as DefaultCredit
    from lipdp_lightning.data_modules.benchmark_tables import Dropout as Dropout
    from lipdp_lightning.data_modules.benchmark_tables import GermanCredit as GermanCredit
    from lipdp_lightning.data_modules.benchmark_tables import Nursery as Nursery
    from lipdp_lightning.data_modules.benchmark_tables import WineQuality as WineQuality
    from lipdp_lightning.data_modules.cifar import CIFAR10 as CIFAR10
    from lipdp_lightning.data_modules.csv_table import CSVTable as CSVTable
    from lipdp_lightning.data_modules.csv_table import SchemaTable as SchemaTable
    from lipdp_lightning.data_modules.declaration import Declaration as Declaration
    from lipdp_lightning.data_modules.declared_arrays import DeclaredArrays as DeclaredArrays
    from lipdp_lightning.data_modules.declared_arrays import TarShards as TarShards
    from lipdp_lightning.data_modules.embedded import Digits as Digits
    from lipdp_lightning.data_modules.embedded import EmbeddedBreastCancer as EmbeddedBreastCancer
    from lipdp_lightning.data_modules.embedded import EmbeddedDiabetes as EmbeddedDiabetes
    from lipdp_lightning.data_modules.embedded import EmbeddedIris as EmbeddedIris
    from lipdp_lightning.data_modules.embedded import EmbeddedWine as EmbeddedWine
    from lipdp_lightning.data_modules.features import Features as Features
    from lipdp_lightning.data_modules.frame_table import FrameTable as FrameTable
    from lipdp_lightning.data_modules.hospitals import DiabetesHospitals as DiabetesHospitals
    from lipdp_lightning.data_modules.idx_images import MNIST as MNIST
    from lipdp_lightning.data_modules.idx_images import FashionMNIST as FashionMNIST
    from lipdp_lightning.data_modules.image_folder import ImageFolder as ImageFolder
    from lipdp_lightning.data_modules.mapped import MappedArrays as MappedArrays
    from lipdp_lightning.data_modules.private_data import PrivateData as PrivateData
    from lipdp_lightning.data_modules.schema import TableSchema as TableSchema
    from lipdp_lightning.data_modules.text import SNLI as SNLI
    from lipdp_lightning.data_modules.text import HashedWords as HashedWords
    from lipdp_lightning.data_modules.text import MovieSnippets as MovieSnippets
    from lipdp_lightning.data_modules.text import SentenceEmbeddings as SentenceEmbeddings
    from lipdp_lightning.data_modules.text import WordVectors as WordVectors
    from lipdp_lightning.data_modules.tokens import GeneratedReviews as GeneratedReviews
    from lipdp_lightning.data_modules.tokens import HashedTokens as HashedTokens
    from lipdp_lightning.data_modules.tokens import MovieTokens as MovieTokens
    from lipdp_lightning.data_modules.tokens import SNLITokens as SNLITokens
    from lipdp_lightning.data_modules.tokens import VocabularyTokens as VocabularyTokens

if __name__ != "lipdp_lightning.data_modules":
    raise ImportError(
        f"{__name__} is a folder of lipdp_lightning's checkout, and its package is lipdp_lightning.data_modules. "
        "HINT: from lipdp_lightning.data_modules import ...; a configuration may leave lipdp_lightning out."
    )

_HOME = {
    "android": ("Android",),
    "arrays": ("NpzArrays",),
    "base": ("PrivateDataModule",),
    "cifar": ("CIFAR10",),
    "csv_table": ("CSVTable", "SchemaTable"),
    "declaration": ("Declaration",),
    "declared_arrays": ("DeclaredArrays", "TarShards"),
    "embedded": ("Digits", "EmbeddedBreastCancer", "EmbeddedDiabetes", "EmbeddedIris", "EmbeddedWine"),
    "features": ("Features",),
    "frame_table": ("FrameTable",),
    "hospitals": ("DiabetesHospitals",),
    "idx_images": ("FashionMNIST", "MNIST"),
    "image_folder": ("ImageFolder",),
    "mapped": ("MappedArrays",),
    "private_data": ("PrivateData",),
    "schema": ("TableSchema",),
    "text": ("HashedWords", "MovieSnippets", "SNLI", "SentenceEmbeddings", "WordVectors"),
    "tokens": ("GeneratedReviews", "HashedTokens", "MovieTokens", "SNLITokens", "VocabularyTokens"),
    "benchmark_tables": (
        "Adult",
        "BreastCancer",
        "CaliforniaHousing",
        "DefaultCredit",
        "Dropout",
        "GermanCredit",
        "Nursery",
        "WineQuality",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
