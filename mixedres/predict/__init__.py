"""Classification of images by a trained network: `Classifier`, `predictions`.

Every name is imported when it is first used, so that ``python -m mixedres.predict --help`` need not wait for JAX.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.predict.arguments import add_arguments, find_images
    from mixedres.predict.classifier import Classifier, open_classifier, read_classifier
    from mixedres.predict.inference import Output, Prediction, Prepared, default_batch_size, predictions, prepare

__all__ = [
    "Classifier",
    "Output",
    "Prediction",
    "Prepared",
    "add_arguments",
    "default_batch_size",
    "find_images",
    "open_classifier",
    "predictions",
    "prepare",
    "read_classifier",
]

__getattr__ = importer(__name__)
