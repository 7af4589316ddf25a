"""Data sets as batches of numpy arrays; importing this starts no device."""

from mixedres.data.load import NAMES, load
from mixedres.data.prefetch import prefetch
from mixedres.data.sources import Batch, InMemory, Source, Synthetic

__all__ = ["NAMES", "Batch", "InMemory", "Source", "Synthetic", "load", "prefetch"]
