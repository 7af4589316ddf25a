"""The handwritten digits that scikit-learn carries: 1,797 images of 8x8 pixels (UCI ML, Alpaydin and Kaynak, 1998)."""

import importlib.util
import math
import pathlib

import numpy as np

from mixedres.data.options import Options
from mixedres.data.sources import InMemory


def load_digits(options: Options) -> InMemory:
    """Returns the digits, enlarged bilinearly: 1,437 training and 360 test images (image_size, image_size, 1) uint8."""
    if options.image_size < 8:
        raise ValueError(f"image_size of digits must be >= 8, got {options.image_size}")
    images, labels, train, test = original_digits()
    images = np.rint(_enlarged(15.0 * images, options.image_size)).astype(np.uint8)[..., None]
    return InMemory(
        images[train],
        labels[train],
        images[test],
        labels[test],
        num_classes=10,
        mean=(float(images[train].mean()),),
        std=(float(images[train].std()),),
        **options.in_memory,
    )


def original_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the digits as scikit-learn has them, and the indices of the two parts."""
    # Importing scikit-learn takes 0.9 CPU seconds, and reading its file 0.01.
    package = importlib.util.find_spec("sklearn")
    file = pathlib.Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else None
    if file is not None and file.is_file():
        table = np.loadtxt(file, delimiter=",")
        images, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)
    else:  # a release that keeps the file elsewhere, or no scikit-learn, which is an error
        from sklearn import datasets

        images, labels = datasets.load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8)
    return images, labels, *_stratified_split(labels, test_fraction=0.2)


def _enlarged(images: np.ndarray, size: int) -> np.ndarray:
    """Returns images (n, 8, 8) as (n, size, size), interpolated bilinearly between the centers of pixels."""
    if size not in (8, 16, 32, 64):
        from scipy.ndimage import zoom

        larger: np.ndarray = zoom(images, (1, size / 8, size / 8), order=1, mode="nearest", grid_mode=True)
        return larger
    # For these sizes, products and sums of pixels are exact, so that every order of them has the bits of `zoom`. The
    # import of scipy.ndimage takes 0.2 CPU seconds.
    places = np.clip((np.arange(size) + 0.5) * (8 / size) - 0.5, 0, 7)
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(8)))
    exact: np.ndarray = weights @ images @ weights.T
    return exact


def _stratified_split(labels: np.ndarray, test_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns sorted indices of a training and a test part, with equal fractions of each class, plus or minus one."""
    # Each example is ranked by its shuffled place within its class, as a fraction of the class; the lowest are tested.
    order = np.random.default_rng(0).permutation(len(labels))
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = (np.arange(len(members)) + 0.5) / len(members)
    by_rank = order[np.argsort(rank[order], kind="stable")]
    tests = math.ceil(test_fraction * len(labels))
    return np.sort(by_rank[tests:]), np.sort(by_rank[:tests])
