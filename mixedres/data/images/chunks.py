"""Chunks: up to 32 consecutive rows of a batch, the unit of work of a thread that decodes images.

A thread decodes straight into the array of its chunk. Compared with Grain's own element-wise pipeline, chunks save a
sixth of the CPU time of an image, because an image has no random generator, dictionary and copy of its own. All threads
work at the same batch, so that few batches are under way.

Everything random is a function of the seed, the step and the row in the global batch. So the batches are the same for
any number of threads, workers and hosts, and a run continues at any step without reading earlier images.
"""

import dataclasses
import functools
import os
import shlex
from typing import NotRequired, TypedDict

import cv2
import numpy as np

from mixedres._internal.cli.console import printable
from mixedres._internal.errors import DataError, reason
from mixedres.data.examples import Examples
from mixedres.data.images import decoding
from mixedres.data.images.augment import Augmentation
from mixedres.data.images.preprocessing import CROP_PCT, Preprocessing
from mixedres.data.sources import epoch_order

# Rows of a chunk.
CHUNK = 32
# Length of training chunks for Grain, which asks for one: more chunks than any run reads.
ENDLESS = 2**60


class Chunk(TypedDict):
    """Rows of a batch, and {name of an image: reason} of the images that could not be read."""

    image: np.ndarray
    label: np.ndarray
    mask: NotRequired[np.ndarray]
    unreadable: dict[str, str]


def chunks_per_batch(rows: int) -> int:
    """Returns the number of chunks in a host's rows of a batch."""
    return -(-rows // CHUNK)


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reader of examples as squares, which names the file of an unreadable image; the options are those of `Loader`."""

    examples: Examples
    shape: tuple[int, int, int]
    preprocessing: Preprocessing
    num_classes: int
    apply_exif: bool
    on_error: str
    max_pixels: int = decoding.MAX_PIXELS
    augmentation: Augmentation | None = None

    def read_random(self, index: int, rng: np.random.Generator, flip: bool, out: np.ndarray) -> int:
        """Writes a random crop of image `index` into `out`, and returns the label."""
        image, label, head = self._open(index)
        box = self.preprocessing.crop(rng, head.height, head.width)
        mirror = flip and rng.random() < 0.5
        self.preprocessing.squares.write_part(image, head, box, out, mirror=mirror)
        if self.augmentation is not None:
            self.augmentation.apply(out, rng)
        return label

    def read_central(self, index: int, out: np.ndarray) -> int:
        """Writes the central crop of image `index` into `out`, and returns the label."""
        image, label, head = self._open(index)
        self.preprocessing.squares.write_center(image, head, out, CROP_PCT)
        return label

    def refuse(self, index: int, error: Exception, unreadable: dict[str, str]) -> str:
        """Adds image `index` to `unreadable` and returns a line with the reason."""
        name = self.examples.file_name(index)
        if not os.path.isabs(name):  # the name in a record, or none
            name = f"{self.examples.name}, example {index}" + (f", {name}" if name else "")
        name = printable(name.encode(errors="surrogateescape").decode(errors="backslashreplace"))  # not all are UTF-8
        unreadable[name] = reason(error)
        if self.on_error == "raise":
            advice = "repair or delete the file, or skip such images with --config.data.on_error=skip"
            if root := getattr(self.examples, "root", None):
                advice += f"; mixedres check {shlex.quote(str(root))} lists all such files"
            raise DataError(f"{name}: {unreadable[name]}; {advice}") from error
        return f"{name}: {unreadable[name]}"

    def _open(self, index: int) -> tuple[bytes, int, decoding.Header]:
        image, label = self.examples[index]
        if not 0 <= label < self.num_classes:
            raise ValueError(f"label {label} is not in 0 to {self.num_classes - 1}")
        return image, label, decoding.read_header(image, apply_exif=self.apply_exif, max_pixels=self.max_pixels)


@dataclasses.dataclass(frozen=True)
class TrainChunks:
    """Endless sequence of training chunks, of up to 32 consecutive rows of a batch each; `rows` are this host's."""

    reader: ImageReader
    batch_size: int
    rows: range
    first_step: int
    seed: int
    flip: bool

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Chunk:
        steps, rows = _rows_of_chunk(number, self.rows)
        step = self.first_step + steps
        total = len(self.reader.examples)
        epoch, place = divmod(step, total // self.batch_size)
        order = epoch_order(total, self.seed, epoch)
        images = np.empty((len(rows), *self.reader.shape), self.reader.preprocessing.squares.dtype)
        labels = np.empty(len(rows), np.int32)
        unreadable: dict[str, str] = {}
        for slot, row in enumerate(rows):
            rng = np.random.Generator(np.random.Philox(key=_key(self.seed), counter=[0, 0, row, step]))
            index = int(order[place * self.batch_size + row])
            labels[slot] = self._one(index, rng, images[slot], unreadable)
        return {"image": images, "label": labels, "unreadable": unreadable}

    def _one(self, index: int, rng: np.random.Generator, out: np.ndarray, unreadable: dict[str, str]) -> int:
        """Writes image `index` into `out`, or the next readable image if `on_error` is 'skip'; returns the label."""
        total = len(self.reader.examples)
        attempts = min(total, 100)
        for attempt in range(attempts):
            candidate = (index + attempt) % total
            try:
                return self.reader.read_random(candidate, rng, self.flip, out)
            except (ValueError, OSError) as error:
                last = self.reader.refuse(candidate, error, unreadable)
        raise DataError(f"{attempts} images in a row cannot be used, from example {index} on; the last: {last}")


@functools.lru_cache(maxsize=8)
def _key(seed: int) -> np.ndarray:
    """Returns a Philox key that differs from the seeds of the permutations."""
    return np.random.SeedSequence((seed, 1)).generate_state(2, np.uint64)


def _rows_of_chunk(number: int, rows: range) -> tuple[int, range]:
    """Returns the batch of chunk `number`, counted from 0, and the rows of the global batch in the chunk."""
    cv2.setNumThreads(0)  # every image has a thread of ours already; set here, in the process that decodes
    batch, part = divmod(number, chunks_per_batch(len(rows)))
    return batch, rows[part * CHUNK : (part + 1) * CHUNK]


@dataclasses.dataclass(frozen=True)
class EvalChunks:
    """Evaluation chunks by number; `rows` are this host's rows of the global batch."""

    reader: ImageReader
    batch_size: int
    rows: range

    def __len__(self) -> int:
        return -(-len(self.reader.examples) // self.batch_size) * chunks_per_batch(len(self.rows))

    def __getitem__(self, number: int) -> Chunk:
        batch, rows = _rows_of_chunk(number, self.rows)
        images = np.zeros((len(rows), *self.reader.shape), self.reader.preprocessing.squares.dtype)
        labels = np.zeros(len(rows), np.int32)
        mask = np.zeros(len(rows), bool)
        unreadable: dict[str, str] = {}
        for slot, row in enumerate(rows):
            index = batch * self.batch_size + row
            if index >= len(self.reader.examples):
                break
            try:
                labels[slot] = self.reader.read_central(index, images[slot])
                mask[slot] = True
            except (ValueError, OSError) as error:
                self.reader.refuse(index, error, unreadable)
        return {"image": images, "label": labels, "mask": mask, "unreadable": unreadable}
