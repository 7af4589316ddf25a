"""Folders of images: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, or ``CLASS/*.jpg`` alone."""

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Collection

import numpy as np

from mixedres._internal.errors import listed
from mixedres._internal.files import expanded, read_regular
from mixedres.data.examples import MAX_BYTES, Dataset, Example

IMAGE_EXTENSIONS = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp"})
# Image formats that are not read; a note counts their files.
_NOT_READ = frozenset({".avif", ".bmp", ".gif", ".heic", ".jp2", ".ppm", ".tif", ".tiff"})
TRAIN_FOLDERS = ("train",)
EVAL_FOLDERS = ("val", "validation", "valid", "test")


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """One part of a folder of images.

    Attributes:
      name: name of the part in messages.
      root: folder that `paths` are relative to.
      paths: paths of the images, with forward slashes, sorted within each class.
      labels: (n,) int32.
    """

    name: str
    root: pathlib.Path
    paths: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Example:
        return Example(read_regular(self.root / self.paths[index], MAX_BYTES), int(self.labels[index]))

    def file_name(self, index: int) -> str:
        """Returns the path of image `index`."""
        return str(self.root / self.paths[index])

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the labels and the paths below the root; the contents of files do not count."""
        digest = hashlib.sha256(self.labels.tobytes())
        digest.update(os.fsencode("\0".join(self.paths)))
        return digest.hexdigest()


def scan(
    directory: str | os.PathLike[str],
    train_split: str | None = None,
    eval_split: str | None = None,
    eval_fraction: float = 0.2,
    split_seed: int = 0,
) -> Dataset:
    """Finds the images under `directory`, at any depth below the folder of their class, without hidden files.

    Without a folder for evaluation, `eval_fraction` of every class is held out: the images with the lowest MD5 hashes
    of `split_seed` and path. So every machine holds out the same images, and new images hardly move old images.

    Args:
      directory: holds folders named after the parts ('train' and one of 'val', 'validation', 'valid', 'test') or after
        the classes.
      train_split: folder of the training part; None: 'train'.
      eval_split: folder of the part for evaluation; None: the first of the names above that exists.
      eval_fraction: fraction of every class to hold out, in (0, 1).
      split_seed: another seed holds out other images.

    Raises:
      ValueError: for a folder that does not exist, has no images or a class without images, and for a class of the
        evaluation part that the training part does not have.
    """
    root = expanded(os.fspath(directory)).absolute()
    if not root.is_dir():
        raise ValueError(f"no folder {root}; name one that holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg")
    train_folder = _part(root, train_split, TRAIN_FOLDERS)
    eval_folder = _part(root, eval_split, EVAL_FOLDERS)
    if eval_folder is not None and train_folder is None:
        raise ValueError(
            f"{root} has a folder {eval_folder}, but no folder train beside it; if {eval_folder} is a class, name it "
            "otherwise, else name the other part with --config.data.train_split=FOLDER"
        )
    others: collections.Counter[str] = collections.Counter()
    if eval_folder is not None and train_folder is not None:
        data_set = _two_folders(root, train_folder, eval_folder, others)
    else:
        data_set = _one_folder(root, train_folder or "", eval_fraction, split_seed, others)
    if not others:
        return data_set
    left_out = f"{others.total()} images in formats that are not read ({', '.join(sorted(others))}) are left out"
    return dataclasses.replace(data_set, note="; ".join(filter(None, (data_set.note, left_out))))


def _two_folders(root: pathlib.Path, train_folder: str, eval_folder: str, others: collections.Counter[str]) -> Dataset:
    train, test = _classes(root, train_folder, others), _classes(root, eval_folder, others)
    unknown = sorted(test.keys() - train.keys())
    if unknown:
        lower = {name.lower(): name for name in train}
        close = next((lower[name.lower()] for name in unknown if name.lower() in lower), None)
        raise ValueError(
            f"{root / eval_folder} has {_count_classes(unknown)} that {root / train_folder} does not have: "
            f"{listed(unknown, 5)}; the training part must have all classes of the evaluation"
            + (f" (there is a {close})" if close else "")
        )
    names = tuple(train)
    return Dataset(
        _images(root, train_folder, train, names), _images(root, eval_folder, test, names), names, apply_exif=True
    )


def _one_folder(
    root: pathlib.Path, folder: str, eval_fraction: float, split_seed: int, others: collections.Counter[str]
) -> Dataset:
    if not 0 < eval_fraction < 1:
        raise ValueError(
            f"eval_fraction must be > 0 and < 1 for a folder without a part for evaluation, got {eval_fraction}"
        )
    classes = _classes(root, folder, others)
    names = tuple(classes)
    train, held_out = {}, {}
    for name, paths in classes.items():
        hashed = sorted(paths, key=lambda path: hashlib.md5(b"%d:" % split_seed + os.fsencode(path)).digest())
        count = min(max(1, round(eval_fraction * len(paths))), len(paths) - 1)
        held_out[name], train[name] = sorted(hashed[:count]), sorted(hashed[count:])
    if not any(held_out.values()):
        raise ValueError(f"{root / folder} has one image a class, which leaves none to test with")
    note = (
        f"{_count_classes(names)}; {eval_fraction:.0%} of every class held out for testing "
        f"(data.eval_fraction={eval_fraction:g}, data.split_seed={split_seed})"
    )
    return Dataset(
        _images(root, folder, train, names, part="train"),
        _images(root, folder, held_out, names, part="held-out"),
        names,
        apply_exif=True,
        note=note,
    )


def images_below(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the paths of all images at any depth below `directory`, sorted, without hidden files."""
    root = pathlib.Path(directory)
    return [str(root / path) for path in sorted(_below(root, root, collections.Counter()))]


def _part(root: pathlib.Path, asked: str | None, usual: tuple[str, ...]) -> str | None:
    """Returns the name of a part's folder; None if there is none."""
    if asked is not None:
        if not asked or asked.startswith("/") or ".." in asked.split("/"):
            raise ValueError(f"{asked!r} is no folder below {root}; name one such as val")
        if not (root / asked).is_dir():
            folders = sorted(path.name for path in root.iterdir() if path.is_dir())
            raise ValueError(f"{root} has no folder {asked!r}; it has {listed(folders, 5) or 'none'}")
        return asked
    return next((name for name in usual if (root / name).is_dir()), None)


def _classes(root: pathlib.Path, folder: str, others: collections.Counter[str]) -> dict[str, list[str]]:
    """Returns {class: sorted paths below `root`} of ``root/folder``; counts formats that are not read in `others`."""
    start = root / folder
    names = sorted(name for name in os.listdir(start) if not name.startswith(".") and (start / name).is_dir())
    if not names:
        reason = "has images but no class folders" if _holds_images(start) else "has no class folders"
        raise ValueError(f"{start} {reason}; put the images in one folder a class, as in {start}/cat/1.jpg")
    classes = {name: sorted(_below(root, start / name, others)) for name in names}
    empty = [name for name, paths in classes.items() if not paths]
    if empty:
        raise ValueError(
            f"{start} has {len(empty)} class folder{'s' if len(empty) > 1 else ''} without an image "
            f"({', '.join(sorted(IMAGE_EXTENSIONS))}): {listed(empty, 5)}; fill or remove them"
        )
    return classes


def _below(root: pathlib.Path, directory: pathlib.Path, others: collections.Counter[str]) -> list[str]:
    paths, seen, own = [], set(), os.path.realpath(directory)
    for parent, folders, files in os.walk(directory, onerror=_raise, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen or own.startswith(real + os.sep):  # a link that leads back, or out and up
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = pathlib.Path(parent).relative_to(root).as_posix()
        paths += [f"{inside}/{name}" for name in files if _is_image(name)]
        others.update(ending for name in files if (ending := os.path.splitext(name)[1].lower()) in _NOT_READ)
    return paths


def _raise(error: OSError) -> None:
    raise error  # os.walk would skip unreadable folders silently


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def _holds_images(directory: pathlib.Path) -> bool:
    return any(map(_is_image, os.listdir(directory)))


def _images(
    root: pathlib.Path, folder: str, classes: dict[str, list[str]], names: tuple[str, ...], part: str = ""
) -> ImageFolder:
    label = {name: index for index, name in enumerate(names)}
    paths = [path for paths_of_class in classes.values() for path in paths_of_class]
    labels = [label[name] for name, paths_of_class in classes.items() for _ in paths_of_class]
    return ImageFolder(f"{root / folder}{part and f' ({part})'}", root, paths, np.asarray(labels, np.int32))


def _count_classes(names: Collection[str]) -> str:
    return f"{len(names)} {'class' if len(names) == 1 else 'classes'}"
