"""Data sets for private training: one file per family, each class a `PrivateDataModule`.

Names are imported when they are first used, so `import data_modules` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_modules.android import Android as Android
    from data_modules.arrays import NpzArrays as NpzArrays
    from data_modules.base import PrivateDataModule as PrivateDataModule
    from data_modules.benchmark_tables import Adult as Adult
    from data_modules.benchmark_tables import BreastCancer as BreastCancer
    from data_modules.benchmark_tables import CaliforniaHousing as CaliforniaHousing
    from data_modules.benchmark_tables import DefaultCredit as DefaultCredit
    from data_modules.benchmark_tables import Dropout as Dropout
    from data_modules.benchmark_tables import GermanCredit as GermanCredit
    from data_modules.benchmark_tables import Nursery as Nursery
    from data_modules.benchmark_tables import WineQuality as WineQuality
    from data_modules.cifar import CIFAR10 as CIFAR10
    from data_modules.csv_table import CSVTable as CSVTable
    from data_modules.csv_table import SchemaTable as SchemaTable
    from data_modules.declaration import Declaration as Declaration
    from data_modules.declared_arrays import DeclaredArrays as DeclaredArrays
    from data_modules.declared_arrays import TarShards as TarShards
    from data_modules.embedded import Digits as Digits
    from data_modules.embedded import EmbeddedBreastCancer as EmbeddedBreastCancer
    from data_modules.embedded import EmbeddedDiabetes as EmbeddedDiabetes
    from data_modules.embedded import EmbeddedIris as EmbeddedIris
    from data_modules.embedded import EmbeddedWine as EmbeddedWine
    from data_modules.features import Features as Features
    from data_modules.frame_table import FrameTable as FrameTable
    from data_modules.hospitals import DiabetesHospitals as DiabetesHospitals
    from data_modules.idx_images import MNIST as MNIST
    from data_modules.idx_images import FashionMNIST as FashionMNIST
    from data_modules.image_folder import ImageFolder as ImageFolder
    from data_modules.mapped import MappedArrays as MappedArrays
    from data_modules.private_data import PrivateData as PrivateData
    from data_modules.schema import TableSchema as TableSchema
    from data_modules.text import SNLI as SNLI
    from data_modules.text import HashedWords as HashedWords
    from data_modules.text import MovieSnippets as MovieSnippets
    from data_modules.text import SentenceEmbeddings as SentenceEmbeddings
    from data_modules.text import WordVectors as WordVectors

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
        raise AttributeError(f"module 'data_modules' has no attribute {name!r}")
    return getattr(import_module(f"data_modules.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
