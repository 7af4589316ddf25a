"""Chunks: up to 32 consecutive rows of a batch, the unit of work of a thread that decodes images.

Compared with Grain's own element-wise pipeline, chunks save a sixth of the CPU time of an image. Everything random is a
function of the seed, the step and the row, so the batches are the same for any number of threads, workers and hosts.
"""

import dataclasses
import functools
import os
import shlex
from typing import TypedDict

import cv2
import numpy as np

from mixedres._internal.cli.console import printable
from mixedres._internal.errors import DataError, reason
from mixedres.data.examples import Examples
from mixedres.data.images import decoding
from mixedres.data.images.augment import Augmentation
from mixedres.data.images.preprocessing import CROP_PCT, Preprocessing
from mixedres.data.options import Options
from mixedres.data.sources import examples_of_step

# Rows of a chunk.
CHUNK = 32
# Length of training chunks for Grain, which asks for one: more chunks than any run reads.
ENDLESS = 2**60


class Chunk(TypedDict):
    """Rows of a batch, and {name of an image: reason} of the images that could not be read."""

    image: np.ndarray
    label: np.ndarray
    mask: np.ndarray
    unreadable: dict[str, str]


def chunks_per_batch(rows: int) -> int:
    """Returns the number of chunks in a host's rows of a batch."""
    return -(-rows // CHUNK)


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reader of examples as squares, which names the file of an unreadable image."""

    examples: Examples
    options: Options
    preprocessing: Preprocessing
    augmentation: Augmentation | None
    num_classes: int
    channels: int
    apply_exif: bool

    def zeros(self, count: int) -> np.ndarray:
        """Returns room for squares, (count, height, width, channels)."""
        size = self.options.image_size
        return np.zeros((count, size, size, self.channels), self.preprocessing.squares.dtype)

    def read_random(self, index: int, rng: np.random.Generator, out: np.ndarray) -> int:
        """Writes a random crop of image `index` into `out`, and returns the label."""
        image, label, head = self._open(index)
        box = self.preprocessing.crop(rng, head.height, head.width)
        mirror = self.options.flip and rng.random() < 0.5
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
        if self.options.on_error == "raise":
            advice = "repair or delete the file, or skip such images with --config.data.on_error=skip"
            if root := getattr(self.examples, "root", None):
                advice += f"; mixedres check {shlex.quote(str(root))} lists all such files"
            raise DataError(f"{name}: {unreadable[name]}; {advice}") from error
        return f"{name}: {unreadable[name]}"

    def _open(self, index: int) -> tuple[bytes, int, decoding.Header]:
        image, label = self.examples[index]
        if not 0 <= label < self.num_classes:
            raise ValueError(f"label {label} is not in 0 to {self.num_classes - 1}")
        most = decoding.most_pixels(self.options.max_pixels)
        return image, label, decoding.read_header(image, apply_exif=self.apply_exif, max_pixels=most)


@dataclasses.dataclass(frozen=True)
class EvalChunks:
    """Evaluation chunks by number; `rows` are this host's rows of the global batch."""

    reader: ImageReader
    batch_size: int
    rows: range

    def __len__(self) -> int:
        return -(-len(self.reader.examples) // self.batch_size) * chunks_per_batch(len(self.rows))

    def __getitem__(self, number: int) -> Chunk:
        cv2.setNumThreads(0)  # every image has a thread of ours already; set here, in the process that decodes
        batch, part = divmod(number, chunks_per_batch(len(self.rows)))
        rows = self.rows[part * CHUNK : (part + 1) * CHUNK]
        images, labels, mask = self.reader.zeros(len(rows)), np.zeros(len(rows), np.int32), np.zeros(len(rows), bool)
        unreadable: dict[str, str] = {}
        for slot, row in enumerate(rows):
            label = self._read(batch, row, images[slot], unreadable)
            if label is not None:
                labels[slot], mask[slot] = label, True
        return {"image": images, "label": labels, "mask": mask, "unreadable": unreadable}

    def _read(self, batch: int, row: int, out: np.ndarray, unreadable: dict[str, str]) -> int | None:
        """Writes the image of a row of the global batch into `out`; returns its label, or None if there is no image."""
        index = batch * self.batch_size + row
        if index < len(self.reader.examples):
            try:
                return self.reader.read_central(index, out)
            except (ValueError, OSError) as error:
                self.reader.refuse(index, error, unreadable)
        return None


@dataclasses.dataclass(frozen=True)
class TrainChunks(EvalChunks):
    """Endless sequence of training chunks."""

    first_step: int
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    def _read(self, batch: int, row: int, out: np.ndarray, unreadable: dict[str, str]) -> int:
        """Writes the image of a row, or the next readable image if `on_error` is 'skip'; returns the label."""
        step, total = self.first_step + batch, len(self.reader.examples)
        index = int(examples_of_step(total, self.batch_size, self.seed, step)[row])
        rng = np.random.Generator(np.random.Philox(key=_key(self.seed), counter=[0, 0, row, step]))
        attempts = min(total, 100)
        for attempt in range(attempts):
            candidate = (index + attempt) % total
            try:
                return self.reader.read_random(candidate, rng, out)
            except (ValueError, OSError) as error:
                last = self.reader.refuse(candidate, error, unreadable)
        raise DataError(f"{attempts} images in a row cannot be used, from example {index} on; the last: {last}")


@functools.lru_cache(maxsize=8)
def _key(seed: int) -> np.ndarray:
    """Returns a Philox key that differs from the seeds of the permutations."""
    return np.random.SeedSequence((seed, 1)).generate_state(2, np.uint64)
