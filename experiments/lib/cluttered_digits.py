"""Cluttered digits: handwritten digits, distorted, in noise and among fragments of others; hard for a ResNet-20.

python -m mixedres.main --config=experiments/lib/cluttered_digits.py:fp16

Expected: 93.9 % of the 10,800 test images in every preset; 0.4 is the standard deviation over seeds (docs/results.md).
Hardware: three minutes on one CPU core.

The data set is made from scikit-learn's digits, and registers itself as ``data.name=cluttered_digits``. It has affine
distortion as in affNIST (Tieleman, 2013), elastic distortion as by Simard, Steinkraus and Platt ("Best practices for
convolutional neural networks", 2003), and the clutter of cluttered MNIST (Mnih et al., "Recurrent models of visual
attention", arXiv 1406.6247): square fragments of other training digits at random places.
"""

import functools
from collections.abc import Iterator

import numpy as np
from scipy.ndimage import map_coordinates, zoom

from mixedres import config as base
from mixedres import data
from mixedres.data.datasets.digits import original_digits
from mixedres.data.sources import ALL, Batch, DataInfo, Shard, padded_batches, sha256_of, training_order

# Number of fixed draws of every test digit.
DRAWS = 30
# Smallest and largest side of an image, in pixels.
SIDES = (16, 64)
# Version of the drawing, part of the fingerprint: raise it if an image of the same seed is drawn differently.
_RECIPE = 1
# Streams of random numbers: for training (as in other sources) and for the test images, which no seed changes.
_TRAIN, _TEST = 1, 3

# Height and width of a digit of scikit-learn, and the fraction of an image that a digit fills.
_PIXELS, _DIGIT_SIDE = 8, 0.7
# Largest distortions at difficulty 1: logarithms of the size and of width to height, the angle in radians, the shear,
# and the shift of the digit as a fraction of the room around it.
_LOG_SCALE, _STRETCH, _ANGLE, _SHEAR, _SHIFT = 0.19, 0.1, 0.31, 0.19, 0.75
# Elastic distortion: standard deviation as a fraction of the side, and number of control points per side.
_ELASTIC, _CONTROL = 0.022, 4
# Number of fragments, and the side of a fragment as a fraction of the image's side.
_FRAGMENTS, _FRAGMENT_SIDE = 4, 0.22
# Smallest difference between ink and background, and standard deviation of the noise, as fractions of the pixel range.
_LEAST_CONTRAST, _NOISE = 0.6, 0.06


class ClutteredDigits(DataInfo):
    """A `Source` that draws every training digit anew in every epoch, and every test digit in `DRAWS` fixed ways.

    Row r of step k is a function of (seed, k, r). No test digit is in a training image, whole or as a fragment. Test
    image i shows test digit i // `DRAWS`, so the draws of one digit are not independent.
    """

    def __init__(
        self,
        train_digits: np.ndarray,
        train_labels: np.ndarray,
        test_digits: np.ndarray,
        test_labels: np.ndarray,
        side: int,
        difficulty: float,
    ):
        """Holds the digits.

        Args:
          train_digits: (n, 8, 8) float32 in [0, 1].
          train_labels: (n,) int32.
          test_digits: (m, 8, 8) float32 in [0, 1].
          test_labels: (m,) int32.
          side: height and width of an image, in pixels.
          difficulty: 1: the distortions at the top of this file; 0: upright, centered, without clutter and noise.
        """
        super().__init__(
            image_shape=(side, side, 1),
            num_classes=10,
            train_examples=len(train_digits),
            eval_examples=DRAWS * len(test_digits),
            mean=(80.0,),
            std=(64.0,),
        )
        self.train_digits, self.train_labels = train_digits, train_labels
        self.test_digits, self.test_labels = test_digits, test_labels
        self.side, self.difficulty = side, difficulty

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns the SHA-256 of the digits, their labels and the options of the drawing."""
        arrays = (self.train_digits, self.train_labels, self.test_digits, self.test_labels)
        return sha256_of(arrays, f"{_RECIPE} {DRAWS} {self.side} {self.difficulty!r}")

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields whole batches, in a new random order in each epoch.

        An epoch leaves out the last digits of its order if they do not fill a batch.
        """
        rows = shard.rows(batch_size)
        for step, order in training_order(self.train_examples, batch_size, seed, first_step):
            chosen = order[rows.start : rows.stop]
            rngs = [np.random.default_rng((seed, _TRAIN, step, row)) for row in rows]
            images = draw_digits(self.train_digits[chosen], self.train_digits, rngs, self.side, self.difficulty)
            yield {"image": images, "label": self.train_labels[chosen]}

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields every test image once, in order; the last batch is padded with zeros and masked."""
        yield from padded_batches(self.test_images, np.repeat(self.test_labels, DRAWS), batch_size, shard)

    @functools.cached_property
    def test_images(self) -> np.ndarray:
        """Returns all test images, (n, side, side, 1) uint8; draws them at the first use."""
        parts = []
        for index, digit in enumerate(self.test_digits):
            rngs = [np.random.default_rng((_TEST, index, draw)) for draw in range(DRAWS)]
            copies = np.broadcast_to(digit, (DRAWS, *digit.shape))
            parts.append(draw_digits(copies, self.train_digits, rngs, self.side, self.difficulty))
        return np.concatenate(parts)


def get_config(argument: str = "fp32"):
    """Returns the config of cluttered digits for PRESET[,key=value...]."""
    config = base.defaults()
    config.epochs = 20
    config.batch_size = 32
    config.eval_every = 0
    config.checkpoint_every = 0
    config.log_every = 44
    config.data.name = "cluttered_digits"
    config.data.image_size = 32
    config.model.name = "cifar_resnet20"
    config.optimizer.learning_rate = 0.1
    config.optimizer.lr_reference_batch = 0
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 1e-3
    config.schedule.name = "cosine"
    config.schedule.warmup = 1
    return base.finish(config, *base.split(argument))


def load_cluttered_digits(*, image_size: int = 32, difficulty: float = 1.0) -> ClutteredDigits:
    """Returns the digits of `mixedres.data.datasets.digits`, in the same split, to be drawn with clutter.

    Args:
      image_size: height and width in pixels, 16 to 64.
      difficulty: 0 to 2; scales angles, shifts, distortion, noise and the number of fragments.

    Raises:
      ValueError: for other values.
    """
    if not SIDES[0] <= image_size <= SIDES[1]:
        raise ValueError(f"image_size of cluttered_digits must be from {SIDES[0]} to {SIDES[1]}, got {image_size}")
    if not 0 <= difficulty <= 2:
        raise ValueError(f"difficulty must be from 0 to 2, got {difficulty}")
    images, labels, train, test = original_digits()
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return ClutteredDigits(images[train], labels[train], images[test], labels[test], image_size, float(difficulty))


def draw_digits(
    shown: np.ndarray, others: np.ndarray, rngs: list[np.random.Generator], side: int, difficulty: float
) -> np.ndarray:
    """Draws digits, each with the random numbers of its own generator.

    Args:
      shown: (n, 8, 8) float32 in [0, 1], the digits to draw.
      others: (m, 8, 8) float32, the digits that fragments are cut from.
      rngs: n generators, one for each image.
      side: height and width of an image, in pixels.
      difficulty: see `load_cluttered_digits`.

    Returns:
      (n, side, side, 1) uint8.
    """
    count, fragments = len(shown), round(difficulty * _FRAGMENTS)
    # All numbers of an image are drawn at once, because the calls of a generator cost more than its numbers.
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
    pixels: np.ndarray = np.rint(255 * np.clip(values, 0, 1)).astype(np.uint8)
    return pixels[..., None]


def _places(pose: np.ndarray, control: np.ndarray, side: int, difficulty: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of every pixel of an image in its digit: y and x, (n, side, side), in pixels of the digit.

    Args:
      pose: (n, 6) in [0, 1): scale, angle, shear, stretch, and the place of the digit.
      control: (n, 2, c, c) normal, elastic shifts of control points; cubic splines interpolate between the points.
      side: height and width of the image, in pixels.
      difficulty: see `load_cluttered_digits`.
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
    """Returns the weight of each control point for each pixel, (side, _CONTROL)."""
    corners, factors = np.eye(_CONTROL, dtype=np.float32), (side / _CONTROL, 1)
    weights: np.ndarray = zoom(corners, factors, order=3, mode="nearest", grid_mode=True)
    return weights


def _add_fragments(ink: np.ndarray, others: np.ndarray, pieces: np.ndarray) -> None:
    """Draws square fragments of upright digits into `ink`; a pixel takes the brighter of the two values.

    Args:
      ink: (n, side, side) float32, changed in place.
      others: (m, 8, 8) float32, the digits.
      pieces: (n, fragments, 5) in [0, 1): the digit, the place of the fragment in the digit, its place in the image.
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
    """Returns the values of digits[which] at (y, x), bilinear, and zero outside; the arguments broadcast."""
    padded = np.pad(digits, ((0, 0), (1, 1), (1, 1)))
    coordinates = np.broadcast_arrays(which, y + 1, x + 1)
    values: np.ndarray = map_coordinates(padded, coordinates, output=np.float32, order=1, prefilter=False)
    return values


data.SOURCES["cluttered_digits"] = lambda options: load_cluttered_digits(image_size=options.image_size)
