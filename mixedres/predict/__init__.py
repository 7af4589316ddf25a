"""Classification of images by a trained network: `Classifier`, `predictions`.

Every name is imported when it is first used, so that ``python -m mixedres.predict --help`` need not wait for JAX.
"""

from typing import TYPE_CHECKING

from mixedres._internal.lazy import importer

if TYPE_CHECKING:
    from mixedres.predict.arguments import add_arguments
    from mixedres.predict.classifier import Classifier, read_classifier
    from mixedres.predict.inference import Prediction, predictions

__all__ = ["Classifier", "Prediction", "add_arguments", "predictions", "read_classifier"]

__getattr__ = importer(
    __name__,
    {
        "Classifier": "classifier",
        "Prediction": "inference",
        "add_arguments": "arguments",
        "predictions": "inference",
        "read_classifier": "classifier",
    },
)
