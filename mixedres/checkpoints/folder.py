"""A checkpoint as a folder of three files: the arrays, the record, and the SHA-256 of both.

A checkpoint is written to ``STEP.tmp``, and is renamed to the number of its step once all of it is on the disk. An old
checkpoint is renamed to ``STEP.tmp`` before it is removed. So a folder whose name is a number is whole, whenever the
process is killed or the machine loses power. Any program that opens .safetensors files opens the arrays.
"""

import os
import pathlib
import re
import shutil
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from mixedres._internal.files import checksums_hold, parse_json, read_object, read_regular, to_disk, write_checksums
from mixedres._internal.types import Json

STATE, RECORD = "state.safetensors", "record.json"
# Names of a folder that is being written or removed; the second is Orbax', with which 0.2 and 0.3 wrote checkpoints.
PARTIAL = re.compile(r"\d+\.(tmp|orbax-checkpoint-tmp.*)")
# Orbax' folder of the arrays, and the file in it that describes them.
_ORBAX, _METADATA = "default", "_METADATA"


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory, whole or damaged, in order."""
    try:
        names = os.listdir(directory)  # unlike glob, it fails if the disk does
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,18}", name))


def write(directory: pathlib.Path, step: int, arrays: Mapping[str, np.ndarray], record: str) -> None:
    """Writes the checkpoint of a step, and returns when it is on the disk; `record` is JSON."""
    partial = directory / f"{step}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        directory.mkdir(exist_ok=True)
        partial.mkdir()
        safetensors.numpy.save_file(dict(arrays), partial / STATE)
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
    """Removes old checkpoints: of those up to the step `newest` the last `keep` stay, and that of the step `best`.

    Tries to remove each, then raises the first error.
    """
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


def is_whole(folder: pathlib.Path) -> bool:
    """Returns whether every file of a checkpoint has its checksum."""
    item = folder / _ORBAX
    return checksums_hold(item, {_METADATA}) if item.is_dir() else checksums_hold(folder, {STATE, RECORD})


def read_record(folder: pathlib.Path) -> Json:
    """Returns the record of a whole checkpoint; raises OSError, ValueError, KeyError or TypeError if there is none."""
    if not (folder / _ORBAX).is_dir():
        return parse_json(read_regular(folder / RECORD))
    return parse_json(read_object(folder / _ORBAX / _METADATA)["custom_metadata"]["record"])


def read_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a whole checkpoint by their paths; raises many types of errors if there are none."""
    if not (folder / _ORBAX).is_dir():
        # Not mapped, because a mapped file that becomes shorter would end the process.
        return safetensors.numpy.load_file(folder / STATE, backend="pread")
    return _read_orbax(folder / _ORBAX)


def _read_orbax(item: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that Orbax saved, each a Zarr array of TensorStore in one database."""
    import tensorstore

    if not all(path.is_file() or path.is_dir() for path in item.rglob("*")):
        raise OSError("it has pipes or devices")  # TensorStore would wait for them
    base, reads = {"driver": "file", "path": f"{item}/"}, {}
    for entry in read_object(item / _METADATA)["tree_metadata"].values():
        if not entry["value_metadata"]["skip_deserialize"]:  # None and empty containers
            names = [part["key"] for part in entry["key_metadata"]]
            store = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(names)}/"}
            reads["/".join(names)] = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True).result().read()
    return {name: read.result() for name, read in reads.items()}
