"""Writes a data set shard by shard, completely or not at all, so that an interrupted start can continue.

Everything is written into ``DATA_DIR/NAME/VERSION.incomplete``, which TensorFlow Datasets does not take for a version:
first the plan, `plan.json`, then the shards, each under a temporary name until it is on the disk, then the metadata.
Only then is the directory renamed to ``VERSION``. A second start with the same plan reuses the shards that
`written.json` lists.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

from mixedres._internal.errors import ConfigError, DataError, one_line
from mixedres._internal.files import lock, read_json, write_json
from mixedres._internal.progress import ImageProgress

PLAN, WRITTEN, LOCK = "plan.json", "written.json", ".lock"
# Reading from a network profits from more threads than cores, and converting does not suffer.
THREADS = max(8, os.cpu_count() or 1)


_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Split:
    """One part of a data set.

    Attributes:
      lengths: number of examples in each shard.
      digest: a hash that changes with the examples and their order.
      records: a function of shard index and executor to the shard's records, fewer where examples are left out; the
        work of the executor begins with the call.
    """

    lengths: Sequence[int]
    digest: str
    records: Callable[[int, concurrent.futures.Executor], Iterator[bytes]]


@dataclasses.dataclass(frozen=True)
class Written:
    """The content of a shard: number of examples, and bytes of records."""

    examples: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A data set to write.

    Attributes:
      name, version: of the data set.
      origin: source and options, as JSON.
      splits: its parts by name.
      write_info: writes the metadata of TensorFlow Datasets into a directory, given the contents of the shards.
    """

    name: str
    version: str
    origin: Mapping[str, Any]
    splits: Mapping[str, Split]
    write_info: Callable[[pathlib.Path, Mapping[str, Sequence[Written]]], None]

    def plan(self) -> dict[str, Any]:
        """The plan, which a second start must share."""
        parts = {
            name: {"examples": sum(part.lengths), "shards": len(part.lengths), "digest": part.digest}
            for name, part in self.splits.items()
        }
        return {"name": self.name, "version": self.version, **self.origin, "splits": parts}


def final_directory(data_dir: pathlib.Path, name: str, version: str) -> pathlib.Path:
    """The directory of the finished data set; raises `ConfigError` where it exists."""
    final = data_dir / name / version
    if final.exists():
        raise ConfigError(f"{final} is already prepared; remove it, or name another --data_dir, to prepare it again")
    return final


def write(recipe: Recipe, data_dir: pathlib.Path) -> dict[str, list[Written]]:
    """Writes the data set into `data_dir`, or continues an earlier start that was to write the same.

    Returns:
      The contents of the shards of each split.

    Raises:
      ConfigError: where it exists, is being written by another process, or an earlier start had another plan. Nothing
        is changed then.
      DataError: where an example cannot be read, or a shard cannot be written (the disk is full).
      OSError: where something else cannot be written.
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
            _to_disk(path)
        os.rename(incomplete, final)
        for name in (PLAN, WRITTEN, LOCK):
            (final / name).unlink()
    return written


def shard_name(recipe_name: str, split: str, index: int, count: int) -> str:
    """The file name of a shard, as TensorFlow Datasets has it by default."""
    return f"{recipe_name}-{split}.array_record-{index:05d}-of-{count:05d}"


def _locked(directory: pathlib.Path) -> IO[str]:
    try:
        return lock(directory / LOCK)
    except BlockingIOError:
        raise ConfigError(f"{directory} is being written by another process; wait for it") from None


def _agree(incomplete: pathlib.Path, plan: dict[str, Any]) -> None:
    """Writes `plan` into the directory; raises `ConfigError` where it holds another plan or other files."""
    way_out = f"remove {incomplete} to start over"
    earlier = read_json(incomplete / PLAN)
    if earlier is None:
        # A start that was killed at once leaves no more than this.
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
        raise ConfigError(f"an earlier start was to write something else: {'; '.join(differing)}; {way_out}")


def _write_shards(recipe: Recipe, incomplete: pathlib.Path) -> dict[str, list[Written]]:
    """Writes the missing shards; returns the contents of all."""
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
    """The same items, each after the next has begun, so that the threads have work while a shard is written."""
    current = next(shards, None)
    while current is not None:
        following = next(shards, None)
        yield current
        current = following


def _write_shard(path: pathlib.Path, records: Iterable[bytes], progress: ImageProgress) -> Written:
    from array_record.python import array_record_module

    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)
    examples = num_bytes = 0
    # Stock data sets have groups of one record too: a larger group is read and unpacked whole for one image of it.
    writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
    for record in records:
        _checked(writer.write, partial, record)
        examples, num_bytes = examples + 1, num_bytes + len(record)
        progress.add()
    _checked(writer.close, partial)
    _to_disk(partial)
    os.replace(partial, path)
    return Written(examples, num_bytes)


def _checked(function: Callable[..., None], path: pathlib.Path, *arguments: bytes) -> None:
    try:
        function(*arguments)
    except RuntimeError as error:  # it has no other for a full disk
        reason = one_line(error).partition(";")[0]
        raise DataError(f"cannot write {path}: {reason}; the same command continues where this one stopped") from error


def _to_disk(path: pathlib.Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
