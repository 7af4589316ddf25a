"""The images of ImageNet (ILSVRC 2012) in the two tar files of image-net.org."""

import functools
import os
import pathlib
import re
import tarfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from mixedres._internal.cli.progress import ImageProgress
from mixedres._internal.errors import ConfigError, DataError
from mixedres.data.datasets.imagenet import COUNTS, NAME, TARS, class_names, read_lines
from mixedres.data.prepare.spans import ImageSpans

VERSION = "5.1.0"
HOMEPAGE = "https://image-net.org/"

_TRAIN_NAME = re.compile(r"(n\d{8})_")
_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def from_tars(manual_dir: pathlib.Path, *, partial: bool) -> dict[str, ImageSpans]:
    """Returns the images in the tar files by split, 'train' and 'validation'; reads the headers of the files only.

    Args:
      manual_dir: holds the files of `TARS`.
      partial: accept a set that is missing or incomplete, and of a damaged tar file the images before the damage.

    Raises:
      ConfigError: for missing tar files, and for a number of images that is not ImageNet's; with `partial`, only if
        there are no images.
      DataError: for a tar file with other contents, or (without `partial`) a damaged one.
    """
    tars = {split: manual_dir / name for split, name in TARS.items() if (manual_dir / name).is_file()}
    missing = [name for split, name in TARS.items() if split not in tars]
    if missing and not (tars and partial):
        way_out = ", or prepare the images that are there with --partial" if tars else ""
        raise ConfigError(
            f"no {' and no '.join(missing)} in {manual_dir}; register at {HOMEPAGE} to download "
            f"{'them' if len(missing) > 1 else 'it'}, then type python -m mixedres.data.prepare {NAME} "
            f"--manual_dir=DIR --data_dir=DIR with the directory of the tar files{way_out}"
        )
    index = {"train": _index_train, "validation": _index_validation}
    splits = {split: index[split](path, partial) for split, path in tars.items()}
    check_counts({split: len(images) for split, images in splits.items()}, str(manual_dir), partial=partial)
    return splits


def check_counts(counts: Mapping[str, int], source: str, *, partial: bool) -> None:
    """Raises ConfigError if a part is incomplete; with `partial`, only if a part has no image."""
    wrong = [
        f"{counts.get(split, 0):,} of {count:,} {split} images"
        for split, count in COUNTS.items()
        if counts.get(split, 0) != count
    ]
    if wrong and not partial:
        raise ConfigError(
            f"{source} has {' and '.join(wrong)}, which is not all of ImageNet (was a download cut off?); "
            "prepare the images that are there with --partial"
        )
    empty = [split for split, count in counts.items() if not count]
    if empty:
        raise ConfigError(f"{source} has no {' and no '.join(empty)} images at all")


def class_of(name: str, *, default: str) -> str:
    """Returns the WordNet id of the image with this file name; `default` for an unknown name."""
    if match := _TRAIN_NAME.match(name):
        return match[1]
    match = _VALIDATION_NAME.fullmatch(name)
    return _validation_classes()[int(match[1]) - 1] if match and 1 <= int(match[1]) <= 50_000 else default


@functools.cache
def _validation_classes() -> tuple[str, ...]:
    """Returns the WordNet ids of ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG, in order."""
    return tuple(read_lines("validation_labels.txt"))


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
            keys += [name for name, _, _ in members]
            labels += [label[wnid]] * len(members)
            spans += [(offset, size) for _, offset, size in members]
            progress.add(len(members))
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
    """Returns the files of the tar archive in ``file[start:end]``: base name, offset in `file`, and size.

    With `partial`, returns the files before the cut of an archive that was cut off.

    Raises:
      DataError: without `partial`, for an archive that was cut off or is damaged.
    """
    file.seek(start)
    members = []
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as tar:  # begins at `start`; offsets are positions in `file`
            for member in tar:
                if member.offset_data + member.size > end and not (partial and member.name.endswith(".tar")):
                    raise tarfile.ReadError("unexpected end of data")
                if member.isfile():
                    members.append((os.path.basename(member.name), member.offset_data, member.size))
    except tarfile.ReadError as error:
        if not partial:
            raise DataError(f"{path} is cut off or damaged ({error}); download it again") from error
    return members


def _images(keys: list[str], labels: list[int], spans: list[tuple[int, int]], path: pathlib.Path) -> ImageSpans:
    where = np.zeros((len(keys), 3), np.int64)
    if spans:
        where[:, 1:] = spans
    return ImageSpans(keys, np.asarray(labels, np.int64), [str(path)], where)
