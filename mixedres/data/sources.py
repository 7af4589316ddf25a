"""Sources of batches: arrays in memory, or one synthetic batch repeated."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from mixedres.data.input_spec import InputSpec

# 'image' (batch, height, width, channels) of the source's dtype, 'label' (batch,) int32, and in evaluation 'mask'
# (batch,) bool.
Batch = dict[str, np.ndarray]


class Shard(NamedTuple):
    """The part of every batch that one of `count` hosts feeds to its devices."""

    index: int = 0
    count: int = 1

    @classmethod
    def all(cls) -> Shard:
        """Whole batches, for one host alone."""
        return cls()

    def rows(self, batch_size: int) -> range:
        """The rows of a global batch that are this host's; raises ValueError where the hosts do not divide it."""
        if batch_size % self.count:
            raise ValueError(f"batch_size {batch_size} is not a multiple of the {self.count} hosts")
        size = batch_size // self.count
        return range(self.index * size, (self.index + 1) * size)


ALL = Shard.all()


def epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the training examples in an epoch, (examples,) int64."""
    with _ORDERING:  # all threads ask for a new epoch at the same time
        return _epoch_order(examples, seed, epoch)


_ORDERING = threading.Lock()


@functools.lru_cache(maxsize=2)  # some threads are in the next epoch already
def _epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, 0, epoch)).permutation(examples)


class Source(Protocol):
    """A data set for image classification, in batches.

    Batch sizes are global; a host gets its `Shard` of the rows. All hosts together have every row once, and all of them
    the same number of batches.

    Attributes:
      image_shape: (height, width, channels) of every image.
      image_dtype: of the pixels, whose scale is 0 to 255 in every dtype.
      num_classes: labels lie in [0, num_classes).
      train_examples, eval_examples: sizes of the two parts.
      mean, std: per channel on the scale 0 to 255; None: every image is standardized by itself.
      class_names: by label; empty where classes have no names.
      note: a line for the person who starts a run, or ''.
      unreadable: {name of an image: reason}, the images skipped so far.
    """

    image_shape: tuple[int, int, int]
    image_dtype: np.dtype
    num_classes: int
    train_examples: int
    eval_examples: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    class_names: tuple[str, ...]
    note: str
    unreadable: dict[str, str]

    @property
    def input_spec(self) -> InputSpec:
        """How images from elsewhere become inputs of the network."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the examples, their order and their labels."""
        ...

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Endless batches; the k-th is a function of (seed, first_step + k) alone, so that a run can continue."""
        ...

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
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
      class_names, note, unreadable: see `Source`.
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
    class_names: tuple[str, ...] = ()
    note: str = ""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.train_images.shape[1:]

    @property
    def image_dtype(self) -> np.dtype:
        """Uint8."""
        return self.train_images.dtype

    @property
    def train_examples(self) -> int:
        """Number of training images."""
        return len(self.train_images)

    @property
    def eval_examples(self) -> int:
        """Number of test images."""
        return len(self.eval_images)

    @property
    def input_spec(self) -> InputSpec:
        """The whole image: these images are not cropped."""
        return InputSpec(self.image_shape, self.mean, self.std)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all images and labels."""
        digest = hashlib.sha256()
        for part in (self.train_images, self.train_labels, self.eval_images, self.eval_labels):
            digest.update(np.ascontiguousarray(part))
        return digest.hexdigest()

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Whole batches of a new permutation each epoch; images that do not fill a batch are left out of that epoch."""
        per_epoch = self.train_examples // batch_size
        if not per_epoch:
            raise ValueError(f"batch_size {batch_size} is more than the {self.train_examples} training images")
        rows = shard.rows(batch_size)
        for step in itertools.count(first_step):
            epoch, place = divmod(step, per_epoch)
            order = epoch_order(self.train_examples, seed, epoch)
            chosen = order[place * batch_size : (place + 1) * batch_size]
            images = self._augment(self.train_images[chosen], np.random.default_rng((seed, 1, step)))
            labels = self.train_labels[chosen].astype(np.int32)
            yield {"image": images[rows.start : rows.stop], "label": labels[rows.start : rows.stop]}

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Every test example once, in order; the last batch is padded with zeros and masked."""
        rows = shard.rows(batch_size)
        for start in range(0, self.eval_examples, batch_size):
            part = slice(start + rows.start, start + rows.stop)
            images = self.eval_images[part]
            labels = self.eval_labels[part].astype(np.int32)
            missing = len(rows) - len(images)
            yield {
                "image": np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0))),
                "label": np.pad(labels, (0, missing)),
                "mask": np.arange(len(rows)) < len(images),
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
    """One fixed random batch, repeated: it shows the speed of a step without the cost of data.

    The reference's distribution: pixels from a normal of mean 127 and deviation 60, truncated at two deviations
    (so within uint8), labels uniform below ``num_classes - 1``. The test set is the batch of seed 0, once.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    eval_examples: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    class_names: tuple[str, ...] = ()
    note: str = ""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    fingerprint: str = "synthetic"

    @property
    def image_dtype(self) -> np.dtype:
        """Uint8."""
        return np.dtype(np.uint8)

    @property
    def input_spec(self) -> InputSpec:
        """The whole image."""
        return InputSpec(self.image_shape, self.mean, self.std)

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """The same batch object forever, so that it stays on the device."""
        rows = shard.rows(batch_size)
        batch = {key: value[rows.start : rows.stop] for key, value in self._batch(batch_size, seed).items()}
        while True:
            yield batch

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """One batch, of which the first `eval_examples` rows count."""
        rows = shard.rows(batch_size)
        batch = {key: value[rows.start : rows.stop] for key, value in self._batch(batch_size, 0).items()}
        for start in range(0, self.eval_examples, batch_size):
            yield batch | {"mask": np.asarray(rows) < self.eval_examples - start}

    def _batch(self, batch_size: int, seed: int) -> Batch:
        rng = np.random.default_rng((seed, 2))
        images = rng.standard_normal((batch_size, *self.image_shape), dtype=np.float32)
        while (outside := np.flatnonzero(np.abs(images) > 2)).size:
            images.reshape(-1)[outside] = rng.standard_normal(outside.size, dtype=np.float32)
        labels = rng.integers(0, max(self.num_classes - 1, 1), batch_size, dtype=np.int32)
        return {"image": np.rint(127 + 60 * images).astype(np.uint8), "label": labels}
