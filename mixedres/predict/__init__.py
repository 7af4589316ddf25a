"""Classification of images by a trained network: `Classifier`, `predictions`."""

from typing import Any

__all__ = ["Classifier", "predictions"]


def __getattr__(name: str) -> Any:
    """Imports on demand, so that ``python -m mixedres.predict --help`` need not wait for JAX."""
    if name == "Classifier":
        from mixedres.predict.classifier import Classifier

        return Classifier
    if name == "predictions":
        from mixedres.predict.inference import predictions

        return predictions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
