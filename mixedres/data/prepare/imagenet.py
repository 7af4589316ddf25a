"""ImageNet (ILSVRC 2012) from the two tar files that image-net.org gives to those who register."""

import functools
import os
import pathlib
import re
import tarfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from mixedres._internal.errors import ConfigError, DataError
from mixedres._internal.progress import ImageProgress
from mixedres.data.datasets.imagenet import COUNTS, NAME, TARS, class_names, lines
from mixedres.data.prepare.spans import ImageSpans

VERSION = "5.1.0"
HOMEPAGE = "https://image-net.org/"

_TRAIN_NAME = re.compile(r"(n\d{8})_")
_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def from_tars(manual_dir: pathlib.Path, *, partial: bool) -> dict[str, ImageSpans]:
    """Finds the images in the tar files, without reading them.

    Args:
      manual_dir: holds the files of `TARS`.
      partial: accept a training or validation set that is missing or incomplete.

    Raises:
      ConfigError: for missing tar files, and for a number of images that is not ImageNet's.
      DataError: for a tar file that is damaged.
    """
    found = {split: manual_dir / name for split, name in TARS.items() if (manual_dir / name).is_file()}
    missing = [name for split, name in TARS.items() if split not in found]
    if missing and not (found and partial):
        way_out = ", or prepare what is there with --partial" if found else ""
        raise ConfigError(
            f"no {' and no '.join(missing)} in {manual_dir}; register at {HOMEPAGE} to download "
            f"{'them' if len(missing) > 1 else 'it'}, then type python -m mixedres.data.prepare {NAME} "
            f"--manual_dir=DIR --data_dir=DIR with the directory of the tar files{way_out}"
        )
    index = {"train": _index_train, "validation": _index_validation}
    splits = {split: index[split](path, partial) for split, path in found.items()}
    check_counts({split: len(images) for split, images in splits.items()}, str(manual_dir), partial=partial)
    return splits


def check_counts(counts: Mapping[str, int], source: str, *, partial: bool) -> None:
    """Raises `ConfigError` unless both parts are complete; with `partial`, unless one of them has an image."""
    wrong = [
        f"{counts.get(split, 0):,} of {count:,} {split} images"
        for split, count in COUNTS.items()
        if counts.get(split, 0) != count
    ]
    if wrong and not partial:
        raise ConfigError(
            f"{source} has {' and '.join(wrong)}, which is not all of ImageNet (a download that was cut?); "
            "prepare what is there with --partial"
        )
    empty = [split for split, count in counts.items() if not count]
    if empty:
        raise ConfigError(f"{source} has no {' and no '.join(empty)} images at all")


def class_of(name: str, *, default: str) -> str:
    """The WordNet id of the image with this file name; `default` for an unknown name."""
    if match := _TRAIN_NAME.match(name):
        return match[1]
    match = _VALIDATION_NAME.fullmatch(name)
    return _validation_classes()[int(match[1]) - 1] if match and 1 <= int(match[1]) <= 50_000 else default


@functools.cache
def _validation_classes() -> tuple[str, ...]:
    """The classes of ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG."""
    return tuple(lines("validation_labels.txt"))


def _index_train(path: pathlib.Path, partial: bool) -> ImageSpans:
    label = {name: index for index, name in enumerate(class_names())}
    keys: list[str] = []
    labels: list[int] = []
    spans: list[tuple[int, int]] = []
    end = os.path.getsize(path)
    with path.open("rb") as file, ImageProgress(f"indexing {path.name}", COUNTS["train"]) as progress:
        for inner, start, size in _members(file, path, 0, end, partial):
            wnid = inner.removesuffix(".tar")
            if wnid not in label:
                raise DataError(f"{path} holds {inner}, which is not the tar file of a class of ImageNet")
            members = _members(file, path, start, min(start + size, end), partial)
            names, offsets, sizes = zip(*members, strict=True) if members else ((), (), ())
            keys += names
            labels += [label[wnid]] * len(names)
            spans += zip(offsets, sizes, strict=True)
            progress.add(len(names))
    return _images(keys, labels, spans, path)


def _index_validation(path: pathlib.Path, partial: bool) -> ImageSpans:
    with path.open("rb") as file:
        members = _members(file, path, 0, os.path.getsize(path), partial)
    label = {name: index for index, name in enumerate(class_names())}
    keys = [name for name, _, _ in members]
    classes = [class_of(key, default="") for key in keys]
    unknown = [key for key, wnid in zip(keys, classes, strict=True) if wnid not in label]
    if unknown:
        raise DataError(f"{path} holds {unknown[0]}, which is not a validation image of ImageNet")
    spans = [(offset, size) for _, offset, size in members]
    return _images(keys, [label[wnid] for wnid in classes], spans, path)


def _members(file: BinaryIO, path: pathlib.Path, start: int, end: int, partial: bool) -> list[tuple[str, int, int]]:
    """The files of the tar archive that lies in ``file[start:end]``: base name, offset in `file`, and size.

    With `partial`, an archive that was cut off has the files before the cut; else that raises `DataError`.
    """
    file.seek(start)
    found = []
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as tar:  # begins where the file stands; offsets are the file's
            for member in tar:
                if member.offset_data + member.size > end and not (partial and member.name.endswith(".tar")):
                    raise tarfile.ReadError("unexpected end of data")
                if member.isfile():
                    found.append((os.path.basename(member.name), member.offset_data, member.size))
    except tarfile.ReadError as error:
        if not partial:
            raise DataError(f"{path} is cut off or damaged ({error}); download it again") from error
    return found


def _images(keys: list[str], labels: list[int], spans: list[tuple[int, int]], path: pathlib.Path) -> ImageSpans:
    where = np.zeros((len(keys), 3), np.int64)
    if spans:
        where[:, 1:] = spans
    return ImageSpans(keys, np.asarray(labels, np.int64), [str(path)], where)
