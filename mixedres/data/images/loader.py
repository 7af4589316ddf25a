"""Batches of squares from stored images: decoded, cropped and flipped by Grain's threads or worker processes."""

import functools
import itertools
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mixedres.data.examples import Dataset, Examples
from mixedres.data.images import grain_compat, worker_processes
from mixedres.data.images.chunks import Chunk, EvalChunks, ImageReader, TrainChunks, chunks_per_batch
from mixedres.data.images.preprocessing import get_preprocessing
from mixedres.data.input_spec import InputSpec
from mixedres.data.options import Options
from mixedres.data.sources import ALL, Batch, DataInfo, Shard, check_batch_size

if TYPE_CHECKING:
    import grain


class Loader(DataInfo):
    """A `Source` of the images of a data set."""

    def __init__(self, data_set: Dataset, options: Options):
        """Opens nothing before the first batch."""
        preprocessing = get_preprocessing(options.preprocessing, options.crop_area)
        mean, std = preprocessing.normalization(data_set.channels)
        super().__init__(
            image_shape=(options.image_size, options.image_size, data_set.channels),
            image_dtype=preprocessing.squares.dtype,
            num_classes=options.num_classes or len(data_set.class_names),
            train_examples=len(data_set.train),
            eval_examples=len(data_set.eval),
            mean=mean,
            std=std,
            class_names=data_set.class_names,
            note=data_set.note,
        )
        self.data_set, self.preprocessing, self.options = data_set, preprocessing, options
        self.threads = options.threads or max(1, worker_processes.available_cpus() // max(1, options.workers))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns the fingerprint of the data set."""
        return self.data_set.fingerprint()

    @functools.cached_property
    def sizes(self) -> str:
        """Returns the first 32 characters of the hashes of the sizes of the files, training part first."""
        return f"{self.data_set.train.sizes()[:32]}{self.data_set.eval.sizes()[:32]}"

    @property
    def input_spec(self) -> InputSpec:
        """Returns the central square that evaluation takes."""
        return self.preprocessing.input_spec(self.image_shape[0], self.data_set.channels)

    def eval_file_name(self, index: int) -> str:
        """Returns the name of the file of test image `index`, or ''."""
        return self.data_set.eval.file_name(index)

    def train_batches(self, batch_size: int, *, seed: int, first_step: int = 0, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields whole batches of a new permutation each epoch; the images left at its end are not used in it."""
        check_batch_size(batch_size, self.train_examples)
        rows = shard.rows(batch_size)
        chunks = TrainChunks(self._reader(self.data_set.train), batch_size, rows, first_step, seed)
        return self._batches(chunks, ("image", "label"))

    def eval_batches(self, batch_size: int, *, shard: Shard = ALL) -> Iterator[Batch]:
        """Yields every test image once, in order; the last batch is padded with zeros and masked."""
        chunks = EvalChunks(self._reader(self.data_set.eval), batch_size, shard.rows(batch_size))
        return self._batches(chunks, ("image", "label", "mask"))

    def _reader(self, examples: Examples) -> ImageReader:
        about = (self.num_classes, self.data_set.channels, self.data_set.apply_exif)
        return ImageReader(examples, self.options, self.preprocessing, self.options.augmentation, *about)

    def _batches(self, chunks: EvalChunks, keys: tuple[str, ...]) -> Iterator[Batch]:
        """Yields batches joined from chunks; closing the generator ends threads and processes."""
        per_batch = chunks_per_batch(len(chunks.rows))
        iterator = iter(self._dataset(chunks, per_batch))
        try:
            with worker_processes.signals_blocked():  # processes begin with the first batch
                batch = self._next(iterator, per_batch, keys)
            while batch:
                yield batch
                batch = self._next(iterator, per_batch, keys)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # Grain's frames hold memory shared with the processes
            raise
        finally:
            iterator.close()
            del iterator
            if self.options.workers:
                grain_compat.free_shared_memory()

    def _dataset(self, chunks: EvalChunks, per_batch: int) -> "grain.IterDataset[Chunk]":
        """Returns Grain's pipeline of chunks."""
        import grain

        # At least one batch ahead, and work for every thread.
        buffered, workers = max(2 * self.threads, per_batch), self.options.workers
        read = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=buffered)
        dataset = grain.MapDataset.source(chunks).to_iter_dataset(read)
        if not workers:
            return dataset
        grain_compat.let_grain_start_processes()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=-(-buffered // workers))
        return dataset.mp_prefetch(options, worker_init_fn=worker_processes.initialize_worker)

    def _next(self, iterator: Iterator[Chunk], per_batch: int, keys: tuple[str, ...]) -> Batch:
        """Returns the next batch; an empty one after the last."""
        try:
            chunks: list[Any] = list(itertools.islice(iterator, per_batch))
        except RuntimeError as error:
            raise worker_processes.explain_failure(error) from error
        for chunk in chunks:
            self.unreadable.update(chunk["unreadable"])
        return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in keys} if chunks else {}
