"""The handwritten digits that scikit-learn carries: 1,797 images of 8x8 pixels (UCI ML, Alpaydin and Kaynak, 1998)."""

import math

import numpy as np

from mixedres.data.sources import InMemory


def load_digits(*, image_size: int = 16, pad: int = 0, flip: bool = False) -> InMemory:
    """Returns the digits, enlarged bilinearly: 1,437 training and 360 test images (image_size, image_size, 1) uint8.

    The pixels are the original values, 0 to 16, times 15. The split is fixed and stratified.

    Args:
      image_size: height and width, >= 8.
      pad: see `InMemory`.
      flip: see `InMemory`.

    Raises:
      ValueError: for images smaller than the original.
    """
    if image_size < 8:
        raise ValueError(f"image_size of digits must be >= 8, got {image_size}")
    from scipy.ndimage import zoom

    images, labels, train, test = original_digits()
    factor = image_size / 8
    images = zoom(15.0 * images, (1, factor, factor), order=1, mode="nearest", grid_mode=True)
    images = np.rint(images).astype(np.uint8)[..., None]
    return InMemory(
        images[train],
        labels[train],
        images[test],
        labels[test],
        num_classes=10,
        mean=(float(images[train].mean()),),
        std=(float(images[train].std()),),
        pad=pad,
        flip=flip,
    )


def original_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the digits as scikit-learn has them, and the indices of the two parts.

    Returns:
      (1797, 8, 8) floats from 0 to 16, (1797,) labels, and the sorted indices of the 1,437 training digits and of the
      360 test digits.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images, digits.target, *_stratified_split(digits.target, test_fraction=0.2)


def _stratified_split(labels: np.ndarray, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted indices of a training and a test part, with equal fractions of each class to within one example.

    Each example is ranked by its shuffled place within its class, as a fraction of the class. The lowest ranks are the
    test part. So classes of different sizes lose the same fraction, and the total is exact.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = (np.arange(len(members)) + 0.5) / len(members)
    by_rank = order[np.argsort(rank[order], kind="stable")]
    tests = math.ceil(test_fraction * len(labels))
    return np.sort(by_rank[tests:]), np.sort(by_rank[:tests])
