"""Data sets as batches of numpy arrays; importing this starts no device."""

from mixedres.data.examples import DataError, DataSet, Example, Examples
from mixedres.data.input_spec import InputSpec
from mixedres.data.load import NAMES, Options, load
from mixedres.data.prefetch import Prefetch
from mixedres.data.sources import WHOLE, Batch, InMemory, Shard, Source, Synthetic

__all__ = [
    "NAMES",
    "WHOLE",
    "Batch",
    "DataError",
    "DataSet",
    "Example",
    "Examples",
    "InMemory",
    "InputSpec",
    "Options",
    "Prefetch",
    "Shard",
    "Source",
    "Synthetic",
    "load",
]
