"""Results of an evaluation for each image."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

# Errors whose images are kept, those with the largest losses: 30 MB for images of 224 pixels.
MOST_ERRORS = 200


@dataclasses.dataclass(frozen=True)
class ImageResults:
    """Results of an evaluation for each of n images, in the order of the evaluation; k is min(5, classes).

    Attributes:
      index: (n,) int64, number of the image in the part for evaluation.
      label: (n,) int32, class of the image.
      predicted: (n,) int32, predicted class.
      loss: (n,) float32, cross entropy.
      top: (n, k) int32, the most probable classes, the most probable first.
      probability: (n, k) float32, their probabilities.
      images: {place in these arrays: the network's input} of at most `MOST_ERRORS` errors, the largest loss first.
    """

    index: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    loss: np.ndarray
    top: np.ndarray
    probability: np.ndarray
    images: dict[int, np.ndarray]


class ClassScores(NamedTuple):
    """Scores of a class; 0 where nothing is divided by nothing."""

    images: int
    recall: float
    precision: float
    f1: float


def class_scores(results: ImageResults) -> dict[int, ClassScores]:
    """Returns the scores of the classes that have images or predictions, in order, as scikit-learn defines them."""
    right = results.label[results.label == results.predicted]
    most = int(max(results.label.max(), results.predicted.max())) + 1
    counts = [np.bincount(values, minlength=most).tolist() for values in (results.label, results.predicted, right)]
    scores = {}
    for label, (images, predictions, hits) in enumerate(zip(*counts, strict=True)):
        if images or predictions:
            recall, precision = hits / max(1, images), hits / max(1, predictions)
            scores[label] = ClassScores(images, recall, precision, 2 * hits / (images + predictions))
    return scores


def macro_f1(scores: Mapping[int, ClassScores]) -> float:
    """Returns the mean F1 of the classes."""
    return sum(score.f1 for score in scores.values()) / len(scores)


class ResultCollector:
    """Collects the results of single images, batch by batch: 60 bytes an image, and `MOST_ERRORS` inputs."""

    def __init__(self) -> None:
        self._rows: list[dict[str, np.ndarray]] = []
        self._count = 0
        self._worst: list[tuple[float, int, np.ndarray]] = []  # (loss, place, image), the largest loss first

    def add(
        self, first: int, mask: np.ndarray, results: Mapping[str, np.ndarray], images: Callable[[], np.ndarray]
    ) -> None:
        """Adds a batch.

        Args:
          first: number of the batch's first image in the part for evaluation.
          mask: (b,) bool; rows that are false do not count.
          results: 'label', 'predicted', 'loss', 'top', 'probability', as in `ImageResults`, with b rows.
          images: returns the batch's images (b, h, w, c); called only if the batch has an error to keep.
        """
        kept = np.flatnonzero(mask)
        rows = {name: values[kept] for name, values in results.items()} | {"index": first + kept}
        # A loss that is not a number is larger than all others.
        loss = np.where(np.isnan(rows["loss"]), np.inf, rows["loss"])
        least = self._worst[-1][0] if len(self._worst) == MOST_ERRORS else -1.0
        worst = np.flatnonzero((rows["predicted"] != rows["label"]) & (loss > least))
        if worst.size:
            squares = images()
            self._worst += [(float(loss[row]), self._count + int(row), squares[kept[row]].copy()) for row in worst]
            self._worst = sorted(self._worst, key=lambda item: (-item[0], item[1]))[:MOST_ERRORS]
        self._rows.append(rows)
        self._count += len(kept)

    def results(self) -> ImageResults:
        """Returns the results of all batches; at least one was added."""
        arrays = {name: np.concatenate([rows[name] for rows in self._rows]) for name in self._rows[0]}
        return ImageResults(**arrays, images={place: image for _, place, image in self._worst})
