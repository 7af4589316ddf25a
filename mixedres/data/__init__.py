"""Data sets as batches of numpy arrays; importing this starts no device."""

from typing import TYPE_CHECKING

from mixedres._internal.errors import DataError
from mixedres._internal.lazy import importer
from mixedres.data.catalog import NAMES, PREFIX, SOURCES, load
from mixedres.data.examples import Dataset, Example, Examples
from mixedres.data.input_spec import InputSpec
from mixedres.data.options import Options
from mixedres.data.prefetch import GaveUp, Prefetch
from mixedres.data.results import ClassScores, ImageResults, ResultCollector, class_scores, macro_f1
from mixedres.data.source_checks import check_batch, check_labels, check_scale, check_source, endless
from mixedres.data.sources import Batch, DataInfo, InMemory, Shard, Source, Synthetic, identity

if TYPE_CHECKING:
    from mixedres.data.datasets.folder import IMAGE_EXTENSIONS, images_below, scan
    from mixedres.data.images import geometry
    from mixedres.data.images.crops import center_crops
    from mixedres.data.images.preprocessing import get_preprocessing
    from mixedres.data.images.thumbnails import uri_of_photograph, uri_of_pixels
    from mixedres.data.images.worker_processes import available_cpus

__all__ = [
    "IMAGE_EXTENSIONS",
    "NAMES",
    "PREFIX",
    "SOURCES",
    "Batch",
    "ClassScores",
    "DataError",
    "DataInfo",
    "Dataset",
    "Example",
    "Examples",
    "GaveUp",
    "ImageResults",
    "InMemory",
    "InputSpec",
    "Options",
    "Prefetch",
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
    "endless",
    "geometry",
    "get_preprocessing",
    "identity",
    "images_below",
    "load",
    "macro_f1",
    "scan",
    "uri_of_photograph",
    "uri_of_pixels",
]

# Imported on demand, because the image libraries are slow to import and processes that only read data need no others.
__getattr__ = importer(__name__)
