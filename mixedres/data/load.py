"""Data sets by name."""

from __future__ import annotations

from mixedres.data import digits
from mixedres.data.sources import Source, Synthetic

NAMES = ("digits", "synthetic")
_PLANNED = ("imagenet2012", "cifar10")


def load(
    name: str,
    *,
    image_size: int,
    batch_size: int,
    dir: str | None = None,
    channels: int = 3,
    num_classes: int | None = None,
    train_examples: int | None = None,
    pad: int = 0,
    flip: bool = False,
) -> Source:
    """The data set called `name`.

    Args:
      name: one of `NAMES`.
      image_size: height and width of an image.
      dir: where the data lie; digits and synthetic data need none.
      batch_size: of synthetic data: its test set is one such batch.
      channels, num_classes, train_examples: of synthetic data.
      pad, flip: augmentation of data held in memory.

    Raises:
      ValueError: for an unknown name, and for one that this version cannot read yet.
    """
    if name == "digits":
        return digits.load(image_size=image_size, pad=pad, flip=flip)
    if name == "synthetic":
        if num_classes is None or train_examples is None:
            raise ValueError(
                "synthetic data needs num_classes and train_examples; add --config.data.num_classes=10 and "
                "--config.data.train_examples=50000, say"
            )
        return Synthetic(
            image_shape=(image_size, image_size, channels),
            num_classes=num_classes,
            train_examples=train_examples,
            eval_examples=batch_size,
            mean=(127.0,) * channels,
            std=(60.0,) * channels,
        )
    if name in _PLANNED:
        raise ValueError(
            f"data set {name!r} cannot be read by this version yet; run its recipe on synthetic data with "
            "--config.data.name=synthetic"
        )
    raise ValueError(f"data set {name!r} is unknown; use one of {', '.join(NAMES)}")
