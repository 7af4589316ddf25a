"""Writing of a data set, shard by shard and completely or not at all, so that an interrupted start can continue.

Everything is written into ``DATA_DIR/NAME/VERSION.incomplete``, which TensorFlow Datasets does not take for a version:
first the plan, `plan.json`, then the shards, each under a temporary name until it is on the disk, then the metadata.
Finally the directory is renamed to ``VERSION``. A second start with the same plan reuses the shards that `written.json`
lists.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TypeVar

from mixedres._internal.cli.progress import ImageProgress
from mixedres._internal.errors import ConfigError, DataError, one_line
from mixedres._internal.files import lock, read_json, to_disk, write_json, write_whole
from mixedres._internal.types import Json, Record

PLAN, WRITTEN, LOCK = "plan.json", "written.json", ".lock"
# More threads than cores read faster from a network, and convert as fast.
THREADS = max(8, os.cpu_count() or 1)

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Split:
    """One part of a data set.

    Attributes:
      lengths: number of examples in each shard.
      digest: a hash that changes with the examples and their order.
      records: function from shard index and executor to the shard's records, without the examples that are left out.
        The call starts the work of the executor.
    """

    lengths: Sequence[int]
    digest: str
    records: Callable[[int, concurrent.futures.Executor], Iterator[bytes]]


@dataclasses.dataclass(frozen=True)
class Written:
    """Content of a shard: number of examples, and size of the records in bytes."""

    examples: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A data set to write.

    Attributes:
      name: name of the data set.
      version: version of the data set.
      origin: source and options, as JSON.
      splits: the parts by name.
      write_info: function from a directory and the contents of the shards; writes the metadata of TensorFlow Datasets.
    """

    name: str
    version: str
    origin: Mapping[str, Json]
    splits: Mapping[str, Split]
    write_info: Callable[[pathlib.Path, Mapping[str, Sequence[Written]]], None]

    def plan(self) -> Record:
        """Returns the plan, which must be the same in a second start."""
        parts = {
            name: {"examples": sum(part.lengths), "shards": len(part.lengths), "digest": part.digest}
            for name, part in self.splits.items()
        }
        return {"name": self.name, "version": self.version, **self.origin, "splits": parts}


def final_directory(data_dir: pathlib.Path, name: str, version: str) -> pathlib.Path:
    """Returns the directory of the finished data set; raises ConfigError if the directory exists."""
    final = data_dir / name / version
    if final.exists():
        raise ConfigError(f"{final} is already prepared; remove it, or name another --data_dir, to prepare it again")
    return final


def write_data_set(recipe: Recipe, data_dir: pathlib.Path) -> dict[str, list[Written]]:
    """Writes the data set into `data_dir`, or continues an earlier start with the same plan.

    Returns:
      The contents of the shards of each split.

    Raises:
      ConfigError: if the data set exists, is being written by another process, or an earlier start had another plan.
        Nothing is changed then.
      DataError: if an example cannot be read, or a shard cannot be written (the disk is full).
      OSError: if another file cannot be written.
    """
    final = final_directory(data_dir, recipe.name, recipe.version)
    incomplete = final.with_name(final.name + ".incomplete")
    incomplete.mkdir(parents=True, exist_ok=True)
    with _locked(incomplete):
        final_directory(data_dir, recipe.name, recipe.version)  # another process may have finished in the meantime
        _agree(incomplete, recipe.plan())
        written = _write_shards(recipe, incomplete)
        recipe.write_info(incomplete, written)
        for path in [*incomplete.iterdir(), incomplete]:
            to_disk(path)
        os.rename(incomplete, final)
        for name in (PLAN, WRITTEN, LOCK):
            (final / name).unlink()
    return written


def shard_name(recipe_name: str, split: str, index: int, count: int) -> str:
    """Returns the file name of a shard, by TensorFlow Datasets' default template."""
    return f"{recipe_name}-{split}.array_record-{index:05d}-of-{count:05d}"


def _locked(directory: pathlib.Path) -> IO[str]:
    try:
        return lock(directory / LOCK)
    except BlockingIOError:
        raise ConfigError(f"{directory} is being written by another process; wait for it") from None


def _agree(incomplete: pathlib.Path, plan: Record) -> None:
    """Writes `plan` into the directory; raises ConfigError if the directory holds another plan or other files."""
    way_out = f"remove {incomplete} to start over"
    earlier = read_json(incomplete / PLAN)
    if earlier is None:
        # A start that was killed at once leaves these files.
        if any(path.name not in (LOCK, PLAN, PLAN + ".part") for path in incomplete.iterdir()):
            raise ConfigError(f"{incomplete} holds files but no {PLAN} of an earlier start; {way_out}")
        write_json(incomplete / PLAN, plan)
        return
    old, new = _flat(earlier), _flat(plan)
    differing = [
        f"{key} was {old.get(key)!r}, is now {new.get(key)!r}"
        for key in [*new, *(old.keys() - new.keys())]
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise ConfigError(f"an earlier start had another plan: {'; '.join(differing)}; {way_out}")


def _write_shards(recipe: Recipe, incomplete: pathlib.Path) -> dict[str, list[Written]]:
    """Writes the missing shards; returns the contents of all shards."""
    finished = {name: Written(*counts) for name, counts in (read_json(incomplete / WRITTEN) or {}).items()}
    finished = {name: counts for name, counts in finished.items() if (incomplete / name).exists()}
    shards = [
        (shard_name(recipe.name, split, index, len(part.lengths)), part, index)
        for split, part in recipe.splits.items()
        for index in range(len(part.lengths))
    ]
    total = sum(part.lengths[index] for _, part, index in shards)
    done = sum(part.lengths[index] for name, part, index in shards if name in finished)
    missing = [(name, part, index) for name, part, index in shards if name not in finished]
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    try:
        with ImageProgress("writing", total, done) as progress:
            for name, records in _one_ahead((name, part.records(index, pool)) for name, part, index in missing):
                finished[name] = _write_shard(incomplete / name, records, progress)
                write_json(incomplete / WRITTEN, {name: dataclasses.astuple(held) for name, held in finished.items()})
    finally:
        pool.shutdown(cancel_futures=True)
    return {
        split: [
            finished[shard_name(recipe.name, split, index, len(part.lengths))] for index in range(len(part.lengths))
        ]
        for split, part in recipe.splits.items()
    }


def _one_ahead(shards: Iterator[_Item]) -> Iterator[_Item]:
    """Yields the same items, each after the next item was made, so that threads have work while a shard is written."""
    current = next(shards, None)
    while current is not None:
        following = next(shards, None)
        yield current
        current = following


def _write_shard(path: pathlib.Path, records: Iterable[bytes], progress: ImageProgress) -> Written:
    from array_record.python import array_record_module

    examples = num_bytes = 0
    with write_whole(path) as partial:
        # Groups of one record, as in other data sets: a larger group is read and unpacked whole for one image.
        writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
        for record in records:
            _checked(writer.write, partial, record)
            examples, num_bytes = examples + 1, num_bytes + len(record)
            progress.add()
        _checked(writer.close, partial)
    return Written(examples, num_bytes)


def _checked(function: Callable[..., None], path: pathlib.Path, *arguments: bytes) -> None:
    try:
        function(*arguments)
    except RuntimeError as error:  # ArrayRecord raises it for a full disk
        reason = one_line(error).partition(";")[0]
        raise DataError(f"cannot write {path}: {reason}; the same command continues where this one stopped") from error


def _flat(tree: Mapping[str, Json], prefix: str = "") -> Record:
    flat: Record = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
