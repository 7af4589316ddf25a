"""A checkpoint as a folder of three files: the arrays (.safetensors), the record, and the SHA-256 of both.

A checkpoint is written to ``STEP.tmp``, and is renamed to the number of its step once all of it is on the disk. An old
checkpoint is renamed to ``STEP.tmp`` before it is removed. So a folder whose name is a number is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import safetensors.numpy

from mixedres._internal.files import (
    CHECKSUMS,
    LARGEST_JSON,
    open_regular,
    parse_json,
    read_json,
    read_object,
    read_regular,
    to_disk,
    write_checksums,
)
from mixedres._internal.types import Json

STATE, RECORD = "state.safetensors", "record.json"
# Names of a folder that is being written or removed; the second is Orbax', with which 0.2 and 0.3 wrote checkpoints.
PARTIAL = re.compile(r"\d+\.(tmp|orbax-checkpoint-tmp.*)")
# Orbax' folder of the arrays, and the file in it that describes them.
_ORBAX, _METADATA = "default", "_METADATA"
# Newest checkpoints of which one must be whole.
MOST_TRIED = 20
# A file that Orbax writes last.
_ENDED = "commit_success.txt"
# Most files of a checkpoint: Orbax has a dozen.
_MOST_FILES = 1000
# NumPy's names of the dtypes in a .safetensors file.
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory, whole or damaged, in order."""
    try:
        names = os.listdir(directory)  # unlike glob, it fails if the disk does
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,18}", name))


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a .safetensors file with the rights of the umask; safetensors' own files are their owner's alone."""
    path.touch()
    rights = path.stat().st_mode
    safetensors.numpy.save_file(dict(tensors), path, metadata=metadata)
    path.chmod(rights)


def write(directory: pathlib.Path, step: int, arrays: Mapping[str, np.ndarray], record: str) -> None:
    """Writes the checkpoint of a step, and returns when it is on the disk; `record` is JSON."""
    partial = directory / f"{step}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        directory.mkdir(exist_ok=True)
        partial.mkdir()
        write_tensors(partial / STATE, arrays)
        (partial / RECORD).write_text(record)
        write_checksums(partial, (STATE, RECORD))
        for path in (partial / STATE, partial / RECORD, partial):
            to_disk(path)
        os.replace(partial, directory / str(step))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # what is there may fill the disk
        raise
    to_disk(directory)


def remove_old(directory: pathlib.Path, newest: int, keep: int, best: int | None) -> None:
    """Removes checkpoints up to step `newest`, except the last `keep` and step `best`; raises the first error."""
    errors = []
    for step in [step for step in steps_in(directory) if step <= newest][:-keep]:
        if step != best:
            partial = directory / f"{step}.tmp"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                os.replace(directory / str(step), partial)
                shutil.rmtree(partial)
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]


class Opened(contextlib.AbstractContextManager["Opened"]):
    """A checkpoint whose files stay open: a trainer that removes the checkpoint meanwhile changes nothing.

    Raises OSError for an entry that is no regular file, and for files that are larger than a checkpoint's.
    """

    def __init__(self, path: pathlib.Path, most: int) -> None:
        """Opens the folder `path`, whose arrays have at most `most` bytes."""
        self._item = path / _ORBAX if (path / _ORBAX).is_dir() else None
        self._folder = self._item or path
        self._sizes = _sizes(self._folder)
        # Orbax compresses arrays, and has a few files beside them.
        if sum(self._sizes.values()) > most + 3 * LARGEST_JSON:
            raise OSError(f"its files have {sum(self._sizes.values()):,} bytes, more than its network")
        if self._item is None and self._sizes.keys() != {STATE, RECORD, CHECKSUMS}:
            raise OSError(f"it holds {', '.join(sorted(self._sizes))}")
        with contextlib.ExitStack() as stack:
            self._opened = {name: stack.enter_context(open_regular(self._folder / name)) for name in self._sizes}
            self._files = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def is_whole(self) -> bool:
        """Returns whether every file has its checksum, and no other file has one."""
        try:
            expected = parse_json(self._read(CHECKSUMS))
            names = self._opened.keys() - {CHECKSUMS, _ENDED}
            return set(expected) == names and all(_sha256(self._opened[name]) == expected[name] for name in names)
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def record(self) -> Json:
        """Returns the record; raises OSError, ValueError, KeyError or TypeError if there is none."""
        if self._item is None:
            return parse_json(self._read(RECORD))
        return parse_json(parse_json(self._read(_METADATA))["custom_metadata"]["record"])

    def arrays(self, check: Check) -> dict[str, np.ndarray]:
        """Returns the arrays that `check` chooses by their shapes, by path; raises many types of errors."""
        if self._item is not None:
            return _read_orbax(self._item, parse_json(self._read(_METADATA))["tree_metadata"], check)
        path: str | pathlib.Path = f"/dev/fd/{self._opened[STATE].fileno()}"
        path = path if os.path.exists(path) else self._folder / STATE
        length = int.from_bytes(os.pread(self._opened[STATE].fileno(), 8, 0), "little")
        if length > LARGEST_JSON:
            raise OSError(f"{STATE} begins with {length:,} bytes of names")
        # Not mapped, because a mapped file that becomes shorter would end the process.
        with safetensors.safe_open(path, framework="np", backend="pread") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            stored = {name: Shape(tuple(part.get_shape()), _DTYPES[part.get_dtype()]) for name, part in parts.items()}
            return {name: file.get_tensor(name) for name in check(stored)}

    def _read(self, name: str) -> bytes:
        if self._sizes[name] > LARGEST_JSON:
            raise OSError(f"{name} has {self._sizes[name]:,} bytes, more than {LARGEST_JSON:,}")
        return os.pread(self._opened[name].fileno(), LARGEST_JSON, 0)


def written(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that a run wrote into the folder of a checkpoint, whole or not, by their names."""
    item = path / _ORBAX
    if ".orbax-checkpoint-tmp" in path.name:  # which no other program makes
        return [pathlib.Path(place, name) for place, _, files in os.walk(path) for name in files]
    sums = read_json(item / CHECKSUMS)
    named = [name for name in (sums if isinstance(sums, dict) else ()) if ".." not in pathlib.PurePath(name).parts]
    files = [path / name for name in (STATE, RECORD, CHECKSUMS, f"{CHECKSUMS}.part", "_CHECKPOINT_METADATA", _ENDED)]
    return files + [item / name.lstrip("/") for name in (*named, CHECKSUMS, _ENDED)]


class Shape(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: str


Check: TypeAlias = Callable[[Mapping[str, Shape]], Collection[str]]


def read_record(path: pathlib.Path) -> Json:
    """Returns the record of a checkpoint, if it has its checksum; raises errors as `Opened` and `Opened.record`."""
    folder, name = (path / _ORBAX, _METADATA) if (path / _ORBAX).is_dir() else (path, RECORD)
    data = read_regular(folder / name, LARGEST_JSON)
    if hashlib.sha256(data).hexdigest() != read_object(folder / CHECKSUMS).get(name):
        raise OSError(f"{name} does not have its checksum")
    value = parse_json(data)
    return value if name == RECORD else parse_json(value["custom_metadata"]["record"])


def _sizes(folder: pathlib.Path, prefix: str = "") -> dict[str, int]:
    """Returns {path in a folder: bytes} of the files below it; raises OSError for a link, a pipe or a device."""
    found: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                found |= _sizes(folder / entry.name, f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                found[name] = entry.stat(follow_symlinks=False).st_size
            else:
                raise OSError(f"{name} is a link, a pipe or a device")
            if len(found) > _MOST_FILES or prefix.count("/") > _MOST_FILES:
                raise OSError(f"it has more than {_MOST_FILES:,} files")
    return found


def _sha256(file: io.FileIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _read_orbax(item: pathlib.Path, metadata: Json, check: Check) -> dict[str, np.ndarray]:
    """Returns the arrays that Orbax saved, each a Zarr array of TensorStore in one database."""
    import tensorstore

    base, stores = {"driver": "file", "path": f"{item}/"}, dict[str, Any]()
    for entry in metadata.values():
        if not entry["value_metadata"]["skip_deserialize"]:  # None and empty containers
            names = [part["key"] for part in entry["key_metadata"]]
            store = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(names)}/"}
            stores["/".join(names)] = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True)
    opened = {name: store.result() for name, store in stores.items()}
    for name, store in opened.items():
        parts = store.chunk_layout.read_chunk.shape or ()  # None for a scalar
        if any(part > max(1, side) for part, side in zip(parts, store.shape, strict=bool(parts))):
            raise OSError(f"{name} lies in parts that are larger than the array")
    stored = {name: Shape(tuple(store.shape), np.dtype(store.dtype.numpy_dtype).name) for name, store in opened.items()}
    reads = {name: opened[name].read() for name in check(stored)}
    return {name: read.result() for name, read in reads.items()}
