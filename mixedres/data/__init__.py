"""Data sets as batches of numpy arrays; importing this starts no device."""

from typing import TYPE_CHECKING

from mixedres._internal.errors import DataError
from mixedres._internal.lazy import importer
from mixedres.data.catalog import NAMES, Options, load
from mixedres.data.examples import Dataset, Example, Examples
from mixedres.data.input_spec import InputSpec
from mixedres.data.prefetch import GaveUp, Prefetch
from mixedres.data.sources import Batch, InMemory, Shard, Source, Synthetic

if TYPE_CHECKING:
    from mixedres.data.images.preprocessing import get_preprocessing

__all__ = [
    "NAMES",
    "Batch",
    "DataError",
    "Dataset",
    "Example",
    "Examples",
    "GaveUp",
    "InMemory",
    "InputSpec",
    "Options",
    "Prefetch",
    "Shard",
    "Source",
    "Synthetic",
    "get_preprocessing",
    "load",
]

# Loaded on demand, because processes that only read data do not need it.
__getattr__ = importer(__name__, {"get_preprocessing": "images.preprocessing"})
