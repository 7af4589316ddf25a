"""Data sets as batches of numpy arrays; importing this starts no device."""

from typing import TYPE_CHECKING

from mixedres._internal.errors import DataError
from mixedres._internal.lazy import importer
from mixedres._internal.registry import PREPROCESSINGS
from mixedres.data.catalog import SOURCES, load
from mixedres.data.examples import MAX_BYTES, Dataset, Example, Examples, hash_of_sizes
from mixedres.data.input_spec import InputSpec
from mixedres.data.options import Options
from mixedres.data.prefetch import GaveUp, Prefetch, map_ahead
from mixedres.data.results import ClassScores, ImageResults, ResultCollector, class_scores, macro_f1
from mixedres.data.source_checks import check_batch, check_labels, check_scale, check_source, endless
from mixedres.data.sources import Batch, DataInfo, InMemory, Shard, Source, Synthetic, identity

if TYPE_CHECKING:
    from mixedres.data.datasets.folder import IMAGE_EXTENSIONS, ImageFolder, images_below, scan, shown_name
    from mixedres.data.images import decoding, geometry, worker_processes
    from mixedres.data.images.crops import center_crops
    from mixedres.data.images.preprocessing import Preprocessing, get_preprocessing
    from mixedres.data.images.squares import Resize
    from mixedres.data.images.worker_processes import available_cpus

__all__ = [
    "IMAGE_EXTENSIONS",
    "MAX_BYTES",
    "PREPROCESSINGS",
    "SOURCES",
    "Batch",
    "ClassScores",
    "DataError",
    "DataInfo",
    "Dataset",
    "Example",
    "Examples",
    "GaveUp",
    "ImageFolder",
    "ImageResults",
    "InMemory",
    "InputSpec",
    "Options",
    "Prefetch",
    "Preprocessing",
    "Resize",
    "ResultCollector",
    "Shard",
    "Source",
    "Synthetic",
    "available_cpus",
    "center_crops",
    "check_batch",
    "check_labels",
    "check_scale",
    "check_source",
    "class_scores",
    "decoding",
    "endless",
    "geometry",
    "get_preprocessing",
    "hash_of_sizes",
    "identity",
    "images_below",
    "load",
    "macro_f1",
    "map_ahead",
    "scan",
    "shown_name",
    "worker_processes",
]

# Imported on demand, because the image libraries are slow to import and processes that only read data need no others.
__getattr__ = importer(__name__)
