"""Where batches come from: arrays in memory, or one synthetic batch again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np

# 'image' (batch, height, width, channels) uint8, 'label' (batch,) int32, and in evaluation 'mask' (batch,) bool.
Batch = dict[str, np.ndarray]


class Source(Protocol):
    """A data set for image classification.

    Attributes:
      image_shape: (height, width, channels) of every image.
      num_classes: labels lie in [0, num_classes).
      train_examples, eval_examples: sizes of the two parts.
      mean, std: per channel on the scale 0 to 255; None: every image is standardised by itself.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    eval_examples: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0) -> Iterator[Batch]:
        """Endless batches; the k-th is a function of (seed, first_step + k) alone, so that a run can continue."""
        ...

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Every test example once, in order; the last batch is padded and masked."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class InMemory:
    """A small data set held in memory, with random shifts and flips in training.

    Attributes:
      train_images, train_labels, eval_images, eval_labels: (n, h, w, c) uint8 and (n,) integers.
      num_classes, mean, std: see `Source`.
      pad: pixels of zero padding before the random crop; 0: no crop.
      flip: mirror an image with probability 1/2.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    eval_images: np.ndarray
    eval_labels: np.ndarray
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pad: int = 0
    flip: bool = False

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.train_images.shape[1:]

    @property
    def train_examples(self) -> int:
        """Number of training images."""
        return len(self.train_images)

    @property
    def eval_examples(self) -> int:
        """Number of test images."""
        return len(self.eval_images)

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0) -> Iterator[Batch]:
        """Whole batches of a new permutation each epoch; what does not fill a batch is left out of that epoch."""
        per_epoch = self.train_examples // batch_size
        if not per_epoch:
            raise ValueError(f"batch_size {batch_size} is more than the {self.train_examples} training images")
        epoch, order = None, np.empty(0, np.int64)
        step = first_step
        while True:
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                order = np.random.default_rng((seed, 0, epoch)).permutation(self.train_examples)
            start = step % per_epoch * batch_size
            chosen = order[start : start + batch_size]
            images = self._augment(self.train_images[chosen], np.random.default_rng((seed, 1, step)))
            yield {"image": images, "label": self.train_labels[chosen].astype(np.int32)}
            step += 1

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Every test example once, in order; the last batch is padded with zeros and masked."""
        for start in range(0, self.eval_examples, batch_size):
            images = self.eval_images[start : start + batch_size]
            labels = self.eval_labels[start : start + batch_size].astype(np.int32)
            missing = batch_size - len(images)
            yield {
                "image": np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0))),
                "label": np.pad(labels, (0, missing)),
                "mask": np.arange(batch_size) < len(images),
            }

    def _augment(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        count, height, width, _ = images.shape
        if self.pad:
            pad = (self.pad, self.pad)
            padded = np.pad(images, ((0, 0), pad, pad, (0, 0)))
            crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
            y, x = rng.integers(0, 2 * self.pad + 1, (2, count))
            images = np.moveaxis(crops[np.arange(count), y, x], 1, -1)
        if self.flip:
            mirrored = rng.integers(0, 2, count).astype(bool)
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        return np.ascontiguousarray(images)


@dataclasses.dataclass(frozen=True, eq=False)
class Synthetic:
    """One fixed random batch, again and again: the speed of a step without the cost of its data.

    The reference's distribution: pixels from a normal of mean 127 and deviation 60, truncated at two deviations
    (so within uint8), labels uniform below ``num_classes - 1``. The test set is the batch of seed 0, once.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    eval_examples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0) -> Iterator[Batch]:
        """The same batch object for ever, which lets the loop keep it on the device."""
        batch = self._batch(batch_size, seed)
        while True:
            yield batch

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """One batch of which `eval_examples` count."""
        batch = self._batch(batch_size, 0)
        for start in range(0, self.eval_examples, batch_size):
            yield batch | {"mask": np.arange(batch_size) < self.eval_examples - start}

    def _batch(self, batch_size: int, seed: int) -> Batch:
        rng = np.random.default_rng((seed, 2))
        images = rng.standard_normal((batch_size, *self.image_shape), dtype=np.float32)
        while (outside := np.flatnonzero(np.abs(images) > 2)).size:
            images.reshape(-1)[outside] = rng.standard_normal(outside.size, dtype=np.float32)
        labels = rng.integers(0, max(self.num_classes - 1, 1), batch_size, dtype=np.int32)
        return {"image": np.rint(127 + 60 * images).astype(np.uint8), "label": labels}
