"""The interface of a source of batches, and two sources: arrays in memory, and one synthetic batch repeated."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mixedres._internal.types import Record
from mixedres.data.input_spec import InputSpec

if TYPE_CHECKING:
    from mixedres.data.images.augment import Augmentation

Batch = dict[str, np.ndarray]
"""Images of a step, as `Source` describes them."""


class Shard(NamedTuple):
    """The part of every batch that one of `count` hosts feeds to its devices."""

    index: int = 0  # type: ignore[assignment]
    count: int = 1  # type: ignore[assignment]

    def rows(self, batch_size: int) -> range:
        """Returns this host's rows of a global batch; raises ValueError if the hosts do not divide the batch."""
        if batch_size % self.count:
            raise ValueError(f"batch_size {batch_size} is not a multiple of the {self.count} hosts")
        size = batch_size // self.count
        return range(self.index * size, (self.index + 1) * size)


ALL = Shard()  # of a single host: whole batches
_UINT8 = np.dtype(np.uint8)


class Source(Protocol):
    """A data set for image classification, in batches.

    A `Batch` is a dictionary of arrays: 'image' (batch, height, width, channels) of `image_dtype`, 'label' (batch,)
    int32, and in evaluation 'mask' (batch,) bool, which is False for padding.

    Any object with these attributes and methods can be trained on. A subclass of `DataInfo` inherits the
    attributes, and defines only `fingerprint`, `train_batches` and `eval_batches`:

        class Ramps(data.DataInfo):
            fingerprint = "ramps, version 1"

            def train_batches(self, batch_size, *, seed, first_step=0, shard=data.Shard()):
                rows = shard.rows(batch_size)
                for step in itertools.count(first_step):
                    labels = np.random.default_rng((seed, step)).integers(0, 2, batch_size, np.int32)
                    yield {"image": ramps(labels[rows.start : rows.stop]), "label": labels[rows.start : rows.stop]}

            def eval_batches(self, batch_size, *, shard=data.Shard()):
                for first in range(0, self.eval_examples, batch_size):
                    rows = first + np.asarray(shard.rows(batch_size))
                    labels = (rows % 2).astype(np.int32)
                    yield {"image": ramps(labels), "label": labels, "mask": rows < self.eval_examples}

        def ramps(labels):
            return np.where(labels[:, None, None], np.arange(8), 7 - np.arange(8)).astype(np.uint8)[..., None]

        source = Ramps(image_shape=(1, 8, 1), num_classes=2, train_examples=64, eval_examples=8)

    ``data.SOURCES["ramps"] = lambda options: source`` in a config file gives the source the name ``ramps`` for
    ``config.data.name``.

    Batch sizes are global; a host gets its `Shard` of the rows. All hosts together have every row once, and each host
    has the same number of batches. A batch is copied, so a source may fill the same arrays again after each `yield`.

    Attributes:
      image_shape: (height, width, channels) of every image.
      image_dtype: dtype of the pixels, uint8 or float32; the scale is 0 to 255 in every dtype.
      num_classes: number of classes; labels lie in [0, num_classes).
      train_examples: number of training examples.
      eval_examples: number of test examples.
      mean: mean per channel on the scale 0 to 255; None: every image is standardized by itself.
      std: standard deviation per channel on the scale 0 to 255; None if `mean` is None.
      class_names: names of the classes by label; empty if classes have no names.
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
        """Returns how an image that is not in the data set becomes an input of the network."""

    @property
    def fingerprint(self) -> str:
        """Returns a hash that changes with the examples, their order and their labels.

        The hash is compared between processes and when a run continues. A source of files may also have `sizes`, a
        hash.
        """

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields batches without end; batch k is a function of (seed, first_step + k) alone, so that runs can resume.

        Raises ValueError if the data set cannot fill a batch.
        """

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields every test example once, in order; the last batch is padded and masked."""


@dataclasses.dataclass(eq=False, kw_only=True)
class DataInfo:
    """Facts about a data set, and base class of sources; for the attributes see `Source`."""

    image_shape: tuple[int, int, int]
    num_classes: int
    train_examples: int
    eval_examples: int
    image_dtype: np.dtype = _UINT8
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    class_names: tuple[str, ...] = ()
    note: str = ""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def input_spec(self) -> InputSpec:
        """Returns the whole image as input, uncropped."""
        return InputSpec(self.image_shape, self.mean, self.std)


class InMemory(DataInfo):
    """A small data set held in memory, with random shifts and flips in training."""

    def __init__(
        self,
        train_images: np.ndarray,
        train_labels: np.ndarray,
        eval_images: np.ndarray,
        eval_labels: np.ndarray,
        *,
        pad: int = 0,
        flip: bool = False,
        augmentation: Augmentation | None = None,
        **info: Any,
    ):
        """Holds arrays: images (n, h, w, c) uint8, labels (n,) integers.

        `pad`: pixels of zero padding before the random crop; 0: no crop. `flip`: mirror an image with probability 1/2.
        `info`: the other fields of `DataInfo`, such as `num_classes`.
        """
        super().__init__(
            image_shape=train_images.shape[1:],
            image_dtype=train_images.dtype,
            train_examples=len(train_images),
            eval_examples=len(eval_images),
            **info,
        )
        self.train_images, self.train_labels = train_images, train_labels
        self.eval_images, self.eval_labels = eval_images, eval_labels
        self.pad, self.flip, self.augmentation = pad, flip, augmentation

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns the SHA-256 of all images and labels."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.train_labels, self.eval_images, self.eval_labels):
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields whole batches of a new permutation each epoch; the images left at its end are not used in it."""
        rows = shard.rows(batch_size)
        check_batch_size(batch_size, self.train_examples)
        for step in itertools.count(first_step):
            chosen = examples_of_step(self.train_examples, batch_size, seed, step)
            images = self._augment(self.train_images[chosen], np.random.default_rng((seed, 1, step)))
            labels = self.train_labels[chosen].astype(np.int32)
            yield {"image": images[rows.start : rows.stop], "label": labels[rows.start : rows.stop]}

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields every test example once, in order; the last batch is padded with zeros and masked."""
        rows = shard.rows(batch_size)
        for start in range(0, self.eval_examples, batch_size):
            part = slice(start + rows.start, start + rows.stop)
            images, labels = self.eval_images[part], self.eval_labels[part].astype(np.int32)
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
        images = np.ascontiguousarray(images)
        if self.augmentation is not None:
            for image in images:
                self.augmentation.apply(image, rng)
        return images


class Synthetic(DataInfo):
    """One fixed random batch, repeated: shows the speed of a step without the cost of data.

    The pixels have the reference's distribution: normal with mean 127 and standard deviation 60, truncated at two
    standard deviations, and whole numbers of `image_dtype`. Labels are uniform below ``num_classes - 1``.
    """

    fingerprint = "synthetic"
    is_constant = True  # one batch of training images, which stays on the device

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields the same batch without end."""
        yield from itertools.repeat(self._batch(batch_size, seed, shard.rows(batch_size)))

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields the same batch until it has `eval_examples` rows; the rows beyond them are masked."""
        rows = shard.rows(batch_size)
        batch = self._batch(batch_size, 0, rows)
        for start in range(0, self.eval_examples, batch_size):
            yield batch | {"mask": np.asarray(rows) < self.eval_examples - start}

    def _batch(self, batch_size: int, seed: int, rows: range) -> Batch:
        rng = np.random.default_rng((seed, 2))
        images = rng.standard_normal((batch_size, *self.image_shape), dtype=np.float32)
        while (outside := np.flatnonzero(np.abs(images) > 2)).size:
            images.reshape(-1)[outside] = rng.standard_normal(outside.size, dtype=np.float32)
        labels = rng.integers(0, max(self.num_classes - 1, 1), batch_size, dtype=np.int32)
        pixels = np.rint(127 + 60 * images).astype(self.image_dtype)
        return {"image": pixels[rows.start : rows.stop], "label": labels[rows.start : rows.stop]}


def identity(source: Source, *, with_sizes: bool = True) -> Record:
    """Returns the identity of a data set and the network's input, as JSON; `with_sizes`: ask files for their sizes."""
    sizes = getattr(source, "sizes", None) if with_sizes else None  # a source of a user need not have it
    known = {
        "input": source.input_spec.to_json(),
        "class_names": list(source.class_names),
        "num_classes": source.num_classes,
        "train_examples": source.train_examples,
        "eval_examples": source.eval_examples,
        "fingerprint": source.fingerprint,
    } | ({} if sizes is None else {"sizes": sizes})
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in known.items()}


def check_batch_size(batch_size: int, examples: int) -> None:
    """Raises ValueError if there are fewer training images than a batch has."""
    if batch_size > examples:
        raise ValueError(f"batch_size {batch_size} is more than the {examples} training images")


def examples_of_step(examples: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Returns the indices of the training examples of a step, (batch_size,) int64."""
    epoch, place = divmod(step, examples // batch_size)
    with _ORDERING:  # all threads ask for a new epoch at the same time
        return _epoch_order(examples, seed, epoch)[place * batch_size : (place + 1) * batch_size]


_ORDERING = threading.Lock()


@functools.lru_cache(maxsize=2)  # some threads are in the next epoch already
def _epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, 0, epoch)).permutation(examples)
