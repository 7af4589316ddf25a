"""Batches of squares from stored images: decoded, cropped and flipped by Grain's threads or worker processes."""

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from mixedres.data.examples import Dataset, Examples
from mixedres.data.images import decoding, grain_compat, preprocessing, worker_processes
from mixedres.data.images.chunks import EvalChunks, ImageReader, TrainChunks, chunks_per_batch
from mixedres.data.input_spec import InputSpec
from mixedres.data.sources import ALL, Batch, Shard

ON_ERROR = ("raise", "skip")


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """A `Source` of the images of a data set.

    Attributes:
      data_set: the images.
      image_size: height and width of the squares.
      preprocessing: how images become squares.
      num_classes: labels must lie in [0, num_classes).
      flip: mirror a training image with probability 1/2.
      threads: decoding threads per decoding process.
      workers: decoding processes; 0: threads of this process decode.
      on_error: 'raise': an unreadable image ends the run; 'skip': in training the next readable image takes its place,
        in evaluation it does not count.
      max_pixels: that an image may have; a larger one is unreadable.
      unreadable: {name of an image: reason}, the images skipped so far.
    """

    data_set: Dataset
    image_size: int
    preprocessing: preprocessing.Preprocessing
    num_classes: int
    flip: bool = False
    threads: int = 1
    workers: int = 0
    on_error: str = "raise"
    max_pixels: int = decoding.MAX_PIXELS
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return (self.image_size, self.image_size, self.data_set.channels)

    @property
    def image_dtype(self) -> np.dtype:
        """Float32 for the preprocessing 'official', else uint8."""
        return self.preprocessing.image_dtype

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.data_set.class_names

    @property
    def note(self) -> str:
        """A line for the person who starts a run, or ''."""
        return self.data_set.note

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of both parts of the data set."""
        return f"{self.data_set.train.fingerprint()[:32]}{self.data_set.eval.fingerprint()[:32]}"

    @property
    def train_examples(self) -> int:
        """Number of training images."""
        return len(self.data_set.train)

    @property
    def eval_examples(self) -> int:
        """Number of test images."""
        return len(self.data_set.eval)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean per channel, on the scale 0 to 255."""
        return self.preprocessing.normalization(self.data_set.channels)[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation per channel, on the scale 0 to 255."""
        return self.preprocessing.normalization(self.data_set.channels)[1]

    @property
    def input_spec(self) -> InputSpec:
        """The central square that evaluation takes."""
        return self.preprocessing.input_spec(self.image_size, self.data_set.channels)

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Whole batches of a new permutation each epoch; images that do not fill a batch are left out of that epoch."""
        if batch_size > self.train_examples:
            raise ValueError(f"batch_size {batch_size} is more than the {self.train_examples} training images")
        rows = shard.rows(batch_size)
        chunks = TrainChunks(self._images(self.data_set.train), batch_size, rows, first_step, seed, self.flip)
        return self._batches(chunks, len(rows))

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Every test image once, in order; the last batch is padded with zeros and masked."""
        rows = shard.rows(batch_size)
        return self._batches(EvalChunks(self._images(self.data_set.eval), batch_size, rows), len(rows))

    def _images(self, examples: Examples) -> ImageReader:
        return ImageReader(
            examples,
            self.image_shape,
            self.preprocessing,
            self.num_classes,
            self.data_set.apply_exif,
            self.on_error,
            self.max_pixels,
        )

    def _batches(self, chunks: Any, local_batch: int) -> Iterator[Batch]:
        """Joins chunks to batches; closing the generator ends threads and processes."""
        per_batch = chunks_per_batch(local_batch)
        iterator = iter(self._dataset(chunks, per_batch))
        try:
            with worker_processes.signals_blocked():  # processes begin with the first batch
                batch = self._next(iterator, per_batch)
            while batch is not None:
                yield batch
                batch = self._next(iterator, per_batch)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # Grain's frames hold memory shared with the processes
            raise
        finally:
            iterator.close()
            del iterator
            if self.workers:
                grain_compat.free_shared_memory()

    def _dataset(self, chunks: Any, per_batch: int) -> Any:
        """Grain's pipeline of chunks."""
        import grain

        # A batch ahead at least, and work for every thread.
        buffered = max(2 * self.threads, per_batch)
        read = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=buffered)
        dataset = grain.MapDataset.source(chunks).to_iter_dataset(read)
        if not self.workers:
            return dataset
        grain_compat.let_grain_start_processes()
        each = -(-buffered // self.workers)
        options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=each)
        return dataset.mp_prefetch(options, worker_init_fn=worker_processes.begin)

    def _next(self, iterator: Iterator[dict[str, Any]], per_batch: int) -> Batch | None:
        """The next batch; None after the last."""
        try:
            parts = list(itertools.islice(iterator, per_batch))
        except RuntimeError as error:
            raise worker_processes.explain_failure(error) from error
        if not parts:
            return None
        for part in parts:
            self.unreadable.update(part.pop("unreadable"))
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
