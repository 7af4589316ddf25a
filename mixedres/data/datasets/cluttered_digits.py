"""Handwritten digits, distorted and among fragments of others: a hard task made from the digits of scikit-learn.

Affine distortion as in affNIST (Tieleman, 2013), elastic distortion as by Simard, Steinkraus and Platt ("Best practices
for convolutional neural networks", 2003), and the clutter of cluttered MNIST (Mnih et al., "Recurrent models of visual
attention", arXiv 1406.6247): square fragments of other training digits at random places.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
from scipy.ndimage import map_coordinates, zoom

from mixedres.data.datasets import digits
from mixedres.data.input_spec import InputSpec
from mixedres.data.sources import ALL, Batch, Shard, epoch_order

# Fixed draws of every test digit, and the sides that an image may have.
DRAWS = 30
SIDES = (16, 64)
# To be raised when an image of the same seed is drawn differently: part of the fingerprint.
_RECIPE = 1
# Streams of random numbers: of training (as in other sources) and of the test images, which no seed changes.
_TRAIN, _TEST = 1, 3

# Height and width of a digit of scikit-learn, and the fraction of an image that it fills.
_PIXELS, _DIGIT_SIDE = 8, 0.7
# What a difficulty of 1 draws, at most: logarithms of the size and of width to height, the angle in radians, the shear,
# and the shift of the digit as a fraction of the room around it.
_LOG_SCALE, _STRETCH, _ANGLE, _SHEAR, _SHIFT = 0.19, 0.1, 0.31, 0.19, 0.75
# Standard deviation of the elastic shift as a fraction of the side, and points on a side of the grid that it is of.
_ELASTIC, _CONTROL = 0.022, 4
# Fragments, and the fraction of the side that one has.
_FRAGMENTS, _FRAGMENT_SIDE = 4, 0.22
# Of the range of the pixels: the smallest difference between ink and background, and the deviation of the noise.
_LEAST_CONTRAST, _NOISE = 0.6, 0.06


@dataclasses.dataclass(frozen=True, eq=False)
class ClutteredDigits:
    """A `Source` that draws every training digit anew in every epoch, and every test digit in `DRAWS` fixed ways.

    Row r of step k is a function of (seed, k, r); no test digit is in a training image, whole or as a fragment. Test
    image i shows test digit i // `DRAWS`: draws of one digit are not independent.

    Attributes:
      train_digits, test_digits: (n, 8, 8) float32 in [0, 1].
      train_labels, test_labels: (n,) int32.
      side: height and width of an image.
      difficulty: 1 as described at the top of this file; 0: upright, centered, without clutter and noise.
    """

    train_digits: np.ndarray
    train_labels: np.ndarray
    test_digits: np.ndarray
    test_labels: np.ndarray
    side: int
    difficulty: float
    num_classes: int = 10
    mean: tuple[float, ...] | None = (80.0,)
    std: tuple[float, ...] | None = (64.0,)
    class_names: tuple[str, ...] = ()
    note: str = ""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(side, side, 1)."""
        return (self.side, self.side, 1)

    @property
    def image_dtype(self) -> np.dtype:
        """Uint8."""
        return np.dtype(np.uint8)

    @property
    def train_examples(self) -> int:
        """Number of training digits."""
        return len(self.train_digits)

    @property
    def eval_examples(self) -> int:
        """Number of test images."""
        return DRAWS * len(self.test_digits)

    @property
    def input_spec(self) -> InputSpec:
        """The whole image."""
        return InputSpec(self.image_shape, self.mean, self.std)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the digits, their labels and what is drawn of them."""
        digest = hashlib.sha256(f"{_RECIPE} {DRAWS} {self.side} {self.difficulty!r}".encode())
        for part in (self.train_digits, self.train_labels, self.test_digits, self.test_labels):
            digest.update(np.ascontiguousarray(part))
        return digest.hexdigest()

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Whole batches of a new permutation each epoch; digits that do not fill a batch are left out of that epoch."""
        per_epoch = self.train_examples // batch_size
        if not per_epoch:
            raise ValueError(f"batch_size {batch_size} is more than the {self.train_examples} training images")
        rows = shard.rows(batch_size)
        for step in itertools.count(first_step):
            epoch, place = divmod(step, per_epoch)
            order = epoch_order(self.train_examples, seed, epoch)
            chosen = order[place * batch_size + rows.start : place * batch_size + rows.stop]
            rngs = [np.random.default_rng((seed, _TRAIN, step, row)) for row in rows]
            images = draw(self.train_digits[chosen], self.train_digits, rngs, self.side, self.difficulty)
            yield {"image": images, "label": self.train_labels[chosen]}

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Every test image once, in order; the last batch is padded with zeros and masked."""
        rows = shard.rows(batch_size)
        for start in range(0, self.eval_examples, batch_size):
            part = slice(start + rows.start, start + rows.stop)
            images = self.test_images[part]
            missing = len(rows) - len(images)
            yield {
                "image": np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0))),
                "label": np.pad(np.repeat(self.test_labels, DRAWS)[part], (0, missing)),
                "mask": np.arange(len(rows)) < len(images),
            }

    @functools.cached_property
    def test_images(self) -> np.ndarray:
        """All test images, (n, side, side, 1) uint8, drawn when first asked for."""
        parts = []
        for index, digit in enumerate(self.test_digits):
            rngs = [np.random.default_rng((_TEST, index, draw)) for draw in range(DRAWS)]
            shown = np.broadcast_to(digit, (DRAWS, *digit.shape))
            parts.append(draw(shown, self.train_digits, rngs, self.side, self.difficulty))
        return np.concatenate(parts)


def load(*, image_size: int = 32, difficulty: float = 1.0) -> ClutteredDigits:
    """The digits of `mixedres.data.datasets.digits`, in the same split.

    Args:
      image_size: height and width, 16 to 64.
      difficulty: 0 or more; scales angles, shifts, distortion, noise and the number of fragments.

    Raises:
      ValueError: for other values.
    """
    if not SIDES[0] <= image_size <= SIDES[1]:
        raise ValueError(f"image_size of cluttered_digits must be from {SIDES[0]} to {SIDES[1]}, got {image_size}")
    if not 0 <= difficulty <= 2:
        raise ValueError(f"difficulty must be from 0 to 2, got {difficulty}")
    images, labels, train, test = digits.originals()
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return ClutteredDigits(images[train], labels[train], images[test], labels[test], image_size, float(difficulty))


def draw(
    shown: np.ndarray, others: np.ndarray, rngs: list[np.random.Generator], side: int, difficulty: float
) -> np.ndarray:
    """Images of digits, each by the random numbers of its own generator.

    Args:
      shown: (n, 8, 8) float32 in [0, 1], the digits to draw.
      others: (m, 8, 8), where fragments come from.
      rngs: n of them.
      side: height and width.
      difficulty: see `load`.

    Returns:
      (n, side, side, 1) uint8.
    """
    count, fragments = len(shown), round(difficulty * _FRAGMENTS)
    # All numbers of an image at once: a generator's calls cost more than its numbers.
    uniform = np.stack([rng.random(8 + 5 * fragments, dtype=np.float32) for rng in rngs])
    normal = np.stack([rng.standard_normal(2 * _CONTROL**2 + side**2, dtype=np.float32) for rng in rngs])
    pose, (fade, brightness), pieces = uniform[:, :6], uniform[:, 6:8].T[..., None, None], uniform[:, 8:]
    control, noise = normal[:, : 2 * _CONTROL**2], normal[:, 2 * _CONTROL**2 :]
    y, x = _places(pose, control.reshape(count, 2, _CONTROL, _CONTROL), side, difficulty)
    ink = _sample(shown, np.arange(count)[:, None, None], y, x)
    _add_fragments(ink, others, pieces.reshape(count, fragments, 5))
    contrast = 1 - min(difficulty, 1) * (1 - _LEAST_CONTRAST) * fade
    values = (1 - contrast) * brightness + contrast * ink
    values += difficulty * _NOISE * noise.reshape(values.shape)
    return np.rint(255 * np.clip(values, 0, 1)).astype(np.uint8)[..., None]


def _places(pose: np.ndarray, control: np.ndarray, side: int, difficulty: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the pixels of an image lie in its digit: y and x, (n, side, side), in the digit's own pixels.

    Args:
      pose: (n, 6) in [0, 1): scale, angle, shear, stretch, and the place of the digit.
      control: (n, 2, c, c) normal, the elastic shifts of points on a grid; between them they are cubic splines.
      side, difficulty: of the image.
    """
    spread = difficulty * (2 * pose - 1)[..., None, None]
    scale, stretch = np.exp(_LOG_SCALE * spread[:, 0]), np.exp(_STRETCH * spread[:, 3])
    cos, sin, shear = np.cos(_ANGLE * spread[:, 1]), np.sin(_ANGLE * spread[:, 1]), _SHEAR * spread[:, 2]
    room = _SHIFT * (1 - _DIGIT_SIDE) / 2
    between = _splines(side)
    shift = difficulty * _ELASTIC * (between @ control @ between.T)
    centers = (np.arange(side, dtype=np.float32) + 0.5) / side - 0.5
    v = centers[:, None] - room * spread[:, 4] + shift[:, 0]
    u = centers[None, :] - room * spread[:, 5] + shift[:, 1]
    u, v = cos * u + sin * v, cos * v - sin * u
    pixels = _PIXELS / (_DIGIT_SIDE * scale)
    middle = (_PIXELS - 1) / 2
    return middle + pixels * v * stretch, middle + pixels * (u + shear * v) / stretch


@functools.cache
def _splines(side: int) -> np.ndarray:
    """(side, _CONTROL): what each control point contributes to each pixel."""
    return zoom(np.eye(_CONTROL, dtype=np.float32), (side / _CONTROL, 1), order=3, mode="nearest", grid_mode=True)


def _add_fragments(ink: np.ndarray, others: np.ndarray, pieces: np.ndarray) -> None:
    """Draws square fragments of upright digits into `ink`, where they are brighter than what is there.

    Args:
      ink: (n, side, side), changed.
      others: (m, 8, 8), the digits.
      pieces: (n, fragments, 5) in [0, 1): which digit, and the places of the fragment in it and in the image.
    """
    side = ink.shape[-1]
    size = round(_FRAGMENT_SIDE * side)
    step = _PIXELS / (_DIGIT_SIDE * side)
    inside = (np.arange(size, dtype=np.float32) + 0.5) * step - 0.5
    images = np.arange(len(ink))[:, None, None]
    for digit, *source, top, left in np.moveaxis(pieces, (1, 2), (0, 1))[..., None, None]:
        y, x = (inside + (_PIXELS - size * step) * start for start in source)
        fragment = _sample(others, (len(others) * digit).astype(int), np.swapaxes(y, 1, 2), x)
        rows, columns = ((side - size + 1) * start for start in (top, left))
        place = images, rows.astype(int) + np.arange(size)[:, None], columns.astype(int) + np.arange(size)
        ink[place] = np.maximum(ink[place], fragment)


def _sample(digits: np.ndarray, which: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Values of digits[which] at (y, x), bilinear, and zero outside; the arguments broadcast."""
    padded = np.pad(digits, ((0, 0), (1, 1), (1, 1)))
    coordinates = np.broadcast_arrays(which, y + 1, x + 1)
    return map_coordinates(padded, coordinates, output=np.float32, order=1, prefilter=False)
