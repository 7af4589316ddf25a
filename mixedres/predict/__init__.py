"""Classification of images by a trained network: `Classifier`, `predictions`; pages: `Gallery`, `write_errors`.

Every name is imported when it is first used, so that ``python -m mixedres.predict --help`` need not wait for JAX.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.predict.arguments import add_arguments
    from mixedres.predict.classifier import Classifier, read_classifier
    from mixedres.predict.errors_page import write_errors
    from mixedres.predict.gallery import Gallery, Tile
    from mixedres.predict.inference import Prediction, predictions

__all__ = [
    "Classifier",
    "Gallery",
    "Prediction",
    "Tile",
    "add_arguments",
    "predictions",
    "read_classifier",
    "write_errors",
]

__getattr__ = importer(
    __name__,
    {
        "Classifier": "classifier",
        "Gallery": "gallery",
        "Prediction": "inference",
        "Tile": "gallery",
        "add_arguments": "arguments",
        "predictions": "inference",
        "read_classifier": "classifier",
        "write_errors": "errors_page",
    },
)
