"""The input of a network: enough to prepare an image that is in no data set."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mixedres._internal.lazy import constant_at
from mixedres._internal.names import MOST_SIDE
from mixedres._internal.registry import RESIZES
from mixedres._internal.types import Json, Record

if TYPE_CHECKING:
    from mixedres.data.images.squares import Resize

RESIZES.add_built_in(
    {
        "area": constant_at("mixedres.data.images.squares:AREA"),
        "linear": constant_at("mixedres.data.images.squares:LINEAR"),
    }
)
# Most channels of an image: more are a mistake or an attack.
MOST_CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The input of a network: a shape, a normalization, and how an image becomes such an input.

    Attributes:
      shape: (height, width, channels); image files can only become squares with 3 channels (RGB) or 1 (luma).
      mean: mean per channel on the scale 0 to 255; None: every image is standardized by itself.
      std: standard deviation per channel on the scale 0 to 255; None if `mean` is None.
      crop_pct: side of the central square as a fraction of the image's shorter side, in (0, 1].
      resize: 'area': average over areas if the image becomes smaller, else interpolate linearly; 'linear': always
        interpolate between the four nearest pixels; 'official': as TensorFlow's official ResNet; or a name of
        `registry.RESIZES`.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float = 1.0
    resize: str = "area"

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that describe no such square."""
        try:
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
            for name in ("mean", "std"):
                if (values := getattr(self, name)) is not None:
                    object.__setattr__(self, name, tuple(float(0.0 + value) for value in values))
            height, width, channels = self.shape
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self} is not a shape with a normalization ({error})") from None
        numbers = [value for values in (self.mean, self.std) if values is not None for value in values]
        good = (
            (self.mean is None) == (self.std is None)
            and len(numbers) == (0 if self.mean is None else 2 * channels)
            and all(math.isfinite(value) for value in numbers)
            and all(value > 0 for value in self.std or ())
            and 1 <= min(height, width) <= max(height, width) <= MOST_SIDE
            and 1 <= channels <= MOST_CHANNELS
            and 0 < self.crop_pct <= 1
            and self.resize in RESIZES
        )
        if not good:
            raise ValueError(f"{self} is not a shape with a normalization")

    @property
    def fits_files(self) -> bool:
        """Returns whether an image file can become the network's input."""
        height, width, channels = self.shape
        return height == width and channels in (1, 3)

    @property
    def squares(self) -> Resize:
        """Returns what makes squares of the files of images."""
        found: Resize = RESIZES[self.resize]()
        return found

    @property
    def image_dtype(self) -> np.dtype:
        """Returns the dtype of the pixels, uint8 or float32; the scale is 0 to 255."""
        return self.squares.dtype

    def to_json(self) -> Record:
        """Returns the spec as an object of JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Json]) -> InputSpec:
        """Returns the spec that `to_json` made; raises ValueError for anything else."""
        try:
            lists = {key: None if record[key] is None else tuple(map(float, record[key])) for key in ("mean", "std")}
            height, width, channels = map(int, record["shape"])
            return cls((height, width, channels), **lists, crop_pct=record["crop_pct"], resize=record["resize"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{record!r} does not say how images become squares ({error})") from None
