"""Data sets as batches of numpy arrays; importing this starts no device."""

from mixedres._internal.errors import DataError
from mixedres.data.catalog import NAMES, Options, load
from mixedres.data.examples import Dataset, Example, Examples
from mixedres.data.input_spec import InputSpec
from mixedres.data.prefetch import GaveUp, Prefetch
from mixedres.data.sources import Batch, InMemory, Shard, Source, Synthetic

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
    "load",
]
