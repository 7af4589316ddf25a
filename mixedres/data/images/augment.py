"""Random changes of training images after crop and flip: TrivialAugment and random erasing, with Pillow.

No other library fits a loader of uint8 arrays: imgaug and AugLy rest since 2020 and 2022, kornia-rs 0.2 and
albumentations 2.0 have no TrivialAugment, its successor is under the AGPL, and Keras 3's layers need a backend.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from mixedres._internal.registry import AUGMENTATIONS

# Magnitudes from 0 to the largest, see `OPERATIONS`.
_LEVELS = 31
# Area of the erased rectangle as fractions of the image, and its aspect ratio: the values of Zhong et al. for ImageNet.
_ERASED_AREA, _ERASED_RATIO = (0.02, 0.4), (0.3, 1 / 0.3)

_Operation = Callable[[Image.Image, float], Image.Image]


def _affine(matrix: Callable[[float], tuple[float, ...]]) -> _Operation:
    """Returns an operation that moves pixels: (x, y) shows (ax + by + c, dx + ey + f), or black outside the image."""
    return lambda image, m: image.transform(image.size, Image.Transform.AFFINE, matrix(m), Image.Resampling.NEAREST)


# Operations of TrivialAugment with wide ranges (Müller and Hutter, 2021, arXiv 2103.10158, table 7), with the largest
# magnitude, and whether half of the magnitudes are negative. Translations are in pixels, rotations in degrees.
OPERATIONS: Mapping[str, tuple[_Operation, float, bool]] = {
    "identity": (lambda image, m: image, 0.0, False),
    "shear_x": (_affine(lambda m: (1, m, 0, 0, 1, 0)), 0.99, True),
    "shear_y": (_affine(lambda m: (1, 0, 0, m, 1, 0)), 0.99, True),
    "translate_x": (_affine(lambda m: (1, 0, int(m), 0, 1, 0)), 32.0, True),
    "translate_y": (_affine(lambda m: (1, 0, 0, 0, 1, int(m))), 32.0, True),
    "rotate": (lambda image, m: image.rotate(m), 135.0, True),
    "brightness": (lambda image, m: ImageEnhance.Brightness(image).enhance(1 + m), 0.99, True),
    "color": (lambda image, m: ImageEnhance.Color(image).enhance(1 + m), 0.99, True),
    "contrast": (lambda image, m: ImageEnhance.Contrast(image).enhance(1 + m), 0.99, True),
    "sharpness": (lambda image, m: ImageEnhance.Sharpness(image).enhance(1 + m), 0.99, True),
    "posterize": (lambda image, m: ImageOps.posterize(image, 8 - round(m)), 6.0, False),
    "solarize": (lambda image, m: ImageOps.solarize(image, math.ceil(255 - m)), 255.0, False),
    "autocontrast": (lambda image, m: ImageOps.autocontrast(image), 0.0, False),
    "equalize": (lambda image, m: ImageOps.equalize(image), 0.0, False),
}
_NAMES = tuple(OPERATIONS)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random changes of a training image."""

    policy: str = "none"  # 'none', 'trivial' (one of `OPERATIONS` on each uint8 image) or of `registry.AUGMENTATIONS`
    erasing: float = 0.0  # probability that a rectangle becomes random pixels (Zhong et al., 2017, arXiv 1708.04896)
    file: str = ""  # registers the policy; a decoding process runs it

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> None:
        """Changes an image (height, width, 1 or 3) in its place; floats are from 0 to 255."""
        if self.policy == "trivial":
            name, level = _NAMES[rng.integers(len(_NAMES))], int(rng.integers(_LEVELS))
            _, largest, signed = OPERATIONS[name]
            sign = -1 if signed and rng.random() < 0.5 else 1
            image[...] = augmented(image, name, sign * largest * level / (_LEVELS - 1))
        elif self.policy != "none":
            change = AUGMENTATIONS.found(self.policy, self.file)
            image[...] = _checked(self.policy, image, change(image.copy(), rng))
        if self.erasing and rng.random() < self.erasing:
            _erase(image, rng)


def _checked(name: str, image: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """Returns a changed image; raises ValueError if it has another shape or dtype."""
    kinds = [f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for x in (image, changed)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the augmentation {name!r} must return an image like the one that it takes, {kinds[0]}, got {kinds[1]}"
        )
    return changed


def augmented(image: np.ndarray, name: str, magnitude: float) -> np.ndarray:
    """Returns a uint8 image (height, width, 1 or 3) after the operation called `name`."""
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return np.asarray(OPERATIONS[name][0](picture, magnitude)).reshape(image.shape)


def _erase(image: np.ndarray, rng: np.random.Generator) -> None:
    """Writes random pixels into a random rectangle; after 100 draws that do not fit, leaves the image as it is."""
    height, width, channels = image.shape
    low, high = map(math.log, _ERASED_RATIO)
    for _ in range(100):
        area, ratio = rng.uniform(*_ERASED_AREA) * height * width, math.exp(rng.uniform(low, high))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            y, x = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            image[y : y + h, x : x + w] = rng.integers(0, 256, (h, w, channels), np.uint8)
            return
