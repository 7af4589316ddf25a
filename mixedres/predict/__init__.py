"""Classification of images by a trained network: `Classifier`, `predictions`; pages: `Gallery`, `write_errors`.

Every name is imported when it is first used, so that ``python -m mixedres.predict --help`` need not wait for JAX.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.predict.arguments import add_arguments, find_images
    from mixedres.predict.classifier import Classifier, open_classifier, read_classifier
    from mixedres.predict.errors_page import write_errors
    from mixedres.predict.gallery import Gallery, Tile
    from mixedres.predict.inference import Prediction, Prepared, default_batch_size, predictions, prepare

__all__ = [
    "Classifier",
    "Gallery",
    "Prediction",
    "Prepared",
    "Tile",
    "add_arguments",
    "default_batch_size",
    "find_images",
    "open_classifier",
    "predictions",
    "prepare",
    "read_classifier",
    "write_errors",
]

__getattr__ = importer(__name__)
