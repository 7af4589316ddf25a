"""Folders of images: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, or ``CLASS/*.jpg`` alone."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from mixedres._internal.errors import listed
from mixedres._internal.files import expanded, read_regular
from mixedres.data.examples import MAX_BYTES, Dataset, Example, hash_of_sizes

# Suffixes of the files that are read as images, in lower case: the formats of `mixedres.data.images.decoding`.
IMAGE_EXTENSIONS = frozenset({".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Image formats that are not read; notes and errors count their files.
_NOT_READ = frozenset({".arw", ".avif", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef"})
# Tables that hold images, and tables that may name the class of each image; none of them is read.
_PACKED, _TABLES = (".parquet", ".arrow"), (".csv", ".tsv", ".jsonl", ".json", ".xlsx")
# Names of the parts, compared without case; the first that exists is taken. Else the parts are two folders whose names
# differ in such a word: seg_train and seg_test, training_set and test_set.
TRAIN_FOLDERS = ("train", "training")
EVAL_FOLDERS = ("val", "validation", "valid", "validate", "dev", "test", "testing", "eval", "evaluation")
# Folders of Synology and of other systems, macOS archives, file systems and Windows; they hold no class.
_SYSTEM_FOLDERS = frozenset({"@eadir", "__macosx", "lost+found", "$recycle.bin", "system volume information"})


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """One part of a folder of images; `paths` are relative to `root`, sorted within each class."""

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

    def sizes(self) -> str:
        """Returns the SHA-256 of the sizes of the files, in order."""
        return hash_of_sizes([f"{self.root}/{path}" for path in self.paths])


@dataclasses.dataclass
class _LeftOut:
    """Files and folders that a scan leaves out: formats and loose images by number, folders by name."""

    formats: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    folders: set[str] = dataclasses.field(default_factory=set)
    loose: int = 0
    beside: list[str] = dataclasses.field(default_factory=list)
    empty: list[str] | None = None  # class folders without images; None: they are an error

    def notes(self) -> Iterator[str]:
        if self.formats:
            yield self.not_read()
        if self.folders:
            yield f"folders of the system are left out: {', '.join(sorted(self.folders))}"
        if self.loose:
            yield f"{self.loose} image{'s' * (self.loose > 1)} beside the class folders left out"
        if self.beside:
            yield f"left out beside the parts: {_listed(self.beside)}"

    def not_read(self) -> str:
        """Returns the images in formats that are not read, as '2 .heic are not read: convert them to .jpg'."""
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(self.formats.items()))
        one = self.formats.total() == 1
        return f"{counts} {'is' if one else 'are'} not read: convert {'it' if one else 'them'} to .jpg"

    def folders_of(self, parent: pathlib.Path, names: Iterable[str]) -> list[str]:
        """Returns the names of folders that may hold images, sorted: no hidden folders and none of the system."""
        system = {name for name in names if name.lower() in _SYSTEM_FOLDERS and (parent / name).is_dir()}
        self.folders |= system
        return sorted(n for n in names if n not in system and not n.startswith(".") and (parent / n).is_dir())


def scan(
    directory: str | os.PathLike[str],
    train_split: str | None = None,
    eval_split: str | None = None,
    eval_fraction: float = 0.2,
    split_seed: int = 0,
    *,
    empty: list[str] | None = None,
) -> Dataset:
    """Finds the images under `directory`, at any depth below the folder of their class, without hidden files.

    Without a test folder, `eval_fraction` of every class is held out: the images with the lowest MD5 hashes
    of `split_seed` and path. So every machine holds out the same images, and new images hardly move old images.

    Args:
      directory: holds folders named after the parts (one of `TRAIN_FOLDERS` and one of `EVAL_FOLDERS`, in any case) or
        after the classes. If it holds one folder alone, that folder is taken instead, as an archive unpacks to.
      train_split: folder of the training part; None: the first of `TRAIN_FOLDERS` that exists; '.': every folder of
        `directory` is a class.
      eval_split: folder of the test part; None: the first of `EVAL_FOLDERS` that exists.
      eval_fraction: fraction of every class to hold out, in (0, 1).
      split_seed: another seed holds out other images.
      empty: takes the class folders without images, as paths below the root; None: they are an error.

    Raises:
      ValueError: for a folder that does not exist, has no images, one class or a class without images, for two classes
        with one name in two Unicode spellings, and for a class of the test part that the training part does not have.
    """
    root = expanded(os.fspath(directory)).absolute()
    if not root.is_dir():
        raise ValueError(f"no folder {root}; name one that holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg")
    left_out = _LeftOut(empty=empty)
    root, notes = _inner_root(root, left_out) if train_split is None and eval_split is None else (root, [])
    train_folder, eval_folder = _parts(root, train_split, eval_split, left_out)
    if eval_folder is not None:
        data_set = _two_folders(root, train_folder, eval_folder, left_out)
    else:
        data_set = _one_folder(root, train_folder, eval_fraction, split_seed, left_out)
    if len(data_set.class_names) == 1:
        raise ValueError(
            f"{root / train_folder} has one class, {_listed(data_set.class_names)}; a classifier needs two or "
            f"more class folders, as in cat/1.jpg and dog/1.jpg{_of_tables(root, root / train_folder)}"
        )
    notes = [data_set.note, *notes, _note_of_untested(data_set), *left_out.notes()]
    return dataclasses.replace(data_set, note="; ".join(filter(None, notes)))


def _note_of_untested(data_set: Dataset) -> str:
    """Returns a note that names the classes with images of which none is a test image."""
    assert isinstance(data_set.train, ImageFolder) and isinstance(data_set.eval, ImageFolder)
    untested = set(data_set.train.labels.tolist()) - set(data_set.eval.labels.tolist())
    names = [data_set.class_names[label] for label in sorted(untested)]
    if not names:
        return ""
    if len(names) == 1:
        return f"class {_listed(names)} has no test image, so its accuracy stays unknown"
    return f"{len(names)} classes have no test image, so their accuracy stays unknown: {_listed(names)}"


def _inner_root(root: pathlib.Path, left_out: _LeftOut) -> tuple[pathlib.Path, list[str]]:
    """Returns the folder that holds the parts or the classes, below folders that hold one folder alone, and notes."""
    inner = root
    while not _holds_images(inner):
        folders = left_out.folders_of(inner, os.listdir(inner))
        if len(folders) != 1 or folders[0].lower() in (*TRAIN_FOLDERS, *EVAL_FOLDERS):
            break
        below = inner / folders[0]
        if not left_out.folders_of(below, os.listdir(below)):
            break
        inner = below
    return inner, [] if inner == root else [f"{root} has one folder alone, so {inner} is taken"]


def _two_folders(root: pathlib.Path, train_folder: str, eval_folder: str, left_out: _LeftOut) -> Dataset:
    train = _classes(root, train_folder, left_out)
    test = _classes(root, eval_folder, left_out, f"; --config.data.dir={root / train_folder} holds out a part of it")
    spelled = {unicodedata.normalize("NFC", name): name for name in train}
    test = {spelled.get(unicodedata.normalize("NFC", name), name): paths for name, paths in test.items()}
    unknown = sorted(name for name, paths in test.items() if name not in train and paths)
    if unknown:
        lower = {name.lower(): name for name in train}
        close = next((lower[name.lower()] for name in unknown if name.lower() in lower), None)
        raise ValueError(
            f"{root / eval_folder} has {_count_classes(unknown)} that {root / train_folder} does not have: "
            f"{_listed(unknown)}; the training part must have all classes of the test part"
            + (f" (there is a {close})" if close else "")
        )
    names = tuple(train)
    return Dataset(
        _images(root, train_folder, train, names),
        _images(root, eval_folder, test, names),
        names,
        apply_exif=True,
        note=f"{_count_classes(names)} ({_listed(names)}); trained on {train_folder}, tested on {eval_folder}",
    )


def _one_folder(root: pathlib.Path, folder: str, eval_fraction: float, split_seed: int, left_out: _LeftOut) -> Dataset:
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction must be > 0 and < 1 for a folder without a test part, got {eval_fraction}")
    classes = _classes(root, folder, left_out)
    names = tuple(classes)
    train, held_out = {}, {}
    for name, paths in classes.items():
        hashed = sorted(paths, key=lambda path: hashlib.md5(b"%d:" % split_seed + os.fsencode(path)).digest())
        count = min(max(1, round(eval_fraction * len(paths))), len(paths) - 1)
        held_out[name], train[name] = sorted(hashed[:count]), sorted(hashed[count:])
    if not any(held_out.values()) and not left_out.empty:
        raise ValueError(f"{root / folder} has one image a class, which leaves none to test with")
    note = (
        f"{_count_classes(names)} ({_listed(names)}); {f'trained on {folder}; ' * bool(folder)}{eval_fraction:.0%} of "
        f"every class held out for testing (data.eval_fraction={eval_fraction:g}, data.split_seed={split_seed})"
    )
    return Dataset(
        _images(root, folder, train, names, part="train"),
        _images(root, folder, held_out, names, part="held-out"),
        names,
        apply_exif=True,
        note=note,
    )


def images_below(directory: str | os.PathLike[str]) -> tuple[list[str], str]:
    """Finds all images at any depth below `directory`, without hidden files.

    Returns:
      the paths, sorted, and the files in image formats that are not read, in words; '' if there are none.
    """
    root, left_out = pathlib.Path(directory), _LeftOut()
    paths = [str(root / path) for path in sorted(_below(root, root, left_out))]
    return paths, left_out.not_read() if left_out.formats else ""


def _parts(
    root: pathlib.Path, train_split: str | None, eval_split: str | None, left_out: _LeftOut
) -> tuple[str, str | None]:
    """Returns the folders of the training part, '' for `root` itself, and of the test part, None if there is none."""
    if train_split == "." and eval_split is None:
        return "", None
    folders = left_out.folders_of(root, os.listdir(root))
    training, testing = _by_rest(folders, TRAIN_FOLDERS), _by_rest(folders, EVAL_FOLDERS)
    rest = () if () in training else min(training.keys() & testing.keys(), default=())
    train, test = _asked(root, train_split) or training.get(rest), _asked(root, eval_split) or testing.get(rest)
    if test is not None and train is None:
        raise ValueError(
            f"{root} has a folder {test}, but no folder train beside it; if {test} is a class, type "
            "--config.data.train_split=., else name the other part with --config.data.train_split=FOLDER"
        )
    parts = [_innermost(root, part, left_out) for part in (train, test) if part is not None]
    if parts:
        left_out.beside = [name for name in folders if name not in {part.split("/")[0] for part in parts}]
    return parts[0] if parts else "", parts[1] if len(parts) > 1 else None


def _by_rest(folders: Sequence[str], usual: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Returns folders whose names have a word of `usual`, by their other words: {(): 'train', ('seg',): ...}."""
    found: dict[tuple[str, ...], str] = {}
    for part in usual:
        for name in reversed(folders):  # train before Train
            words = re.findall(r"[^\W\d_]+|\d+", name.lower())
            if part in words:
                words.remove(part)
                found.setdefault(tuple(words), name)
    return found


def _asked(root: pathlib.Path, asked: str | None) -> str | None:
    """Returns the folder of a part that the user named, after a check."""
    if asked is None:
        return None
    if not asked or asked.startswith("/") or ".." in asked.split("/"):
        raise ValueError(f"{asked!r} is no folder below {root}; name one such as val")
    if not (root / asked).is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise ValueError(f"{root} has no folder {asked!r}; it has {listed(folders, 5) or 'none'}")
    return asked


def _innermost(root: pathlib.Path, folder: str, left_out: _LeftOut) -> str:
    """Returns the folder of a part, or the folder of the same name that it holds alone, as an archive unpacks to."""
    name = os.path.basename(folder)
    while left_out.folders_of(root / folder, os.listdir(root / folder)) == [name]:
        inner = root / folder / name
        if not left_out.folders_of(inner, os.listdir(inner)):
            break
        folder = f"{folder}/{name}"
    return folder


def _classes(root: pathlib.Path, folder: str, left_out: _LeftOut, hint: str = "") -> dict[str, list[str]]:
    """Returns {class: sorted paths below `root`} of ``root/folder``; `hint` ends the error for missing classes."""
    start = root / folder
    entries = os.listdir(start)
    names = left_out.folders_of(start, entries)
    if not names:
        reason = "has images but no class folders" if _holds_images(start) else "has no class folders"
        if left_out.beside and not hint:
            hint = f"; if {folder} is a class, type --config.data.train_split=."
        todo = f"put the images in one folder a class, as in {start}/cat/1.jpg{hint}"
        raise ValueError(f"{start} {reason}; {todo}{_of_tables(root, start)}")
    left_out.loose += sum(_is_image(name) and (start / name).is_file() for name in entries)
    spellings = collections.Counter(unicodedata.normalize("NFC", name) for name in names)
    if twins := [name for name, count in spellings.items() if count > 1]:
        raise ValueError(f"{start} has the class {twins[0]} in two Unicode spellings; move the images into one folder")
    classes = {name: sorted(_below(root, start / name, left_out)) for name in names}
    empty = [name for name, paths in classes.items() if not paths]
    if left_out.empty is not None:
        left_out.empty += [f"{folder}/{name}".lstrip("/") for name in empty]
    elif empty:
        unread = _LeftOut()
        for name in empty:
            _below(root, start / name, unread)
        raise ValueError(
            f"{start} has {len(empty)} class folder{'s' if len(empty) > 1 else ''} without an image "
            f"({', '.join(sorted(IMAGE_EXTENSIONS))}): {_listed(empty)}; "
            + (unread.not_read() if unread.formats else f"fill or remove them{_of_tables(root, start)}")
        )
    return classes


def _of_tables(root: pathlib.Path, start: pathlib.Path) -> str:
    """Returns what to do with tables at the root of a data set, at a part's folder, or one below; '' without tables."""
    inside = (start / name for name in os.listdir(start))
    folders = {root, start, *(path for path in inside if path.is_dir() and os.access(path, os.R_OK))}
    files = sorted(os.path.relpath(path, root) for folder in folders for path in folder.iterdir() if path.is_file())
    by_kind = [[name for name in files if name.lower().endswith(ends)] for ends in (_PACKED, _TABLES)]
    packed, tables = ([name for name in names if not os.path.basename(name).startswith(".")] for names in by_kind)
    if packed:
        return (
            f"; {listed(packed, 2)}: images in tables are not read, so write each image of "
            f"datasets.load_dataset({os.fspath(root)!r}) into CLASS/NUMBER.png"
        )
    if tables:
        return f"; {listed(tables, 2)}: tables of classes are not read, so move each image into the folder of its class"
    return ""


def _below(root: pathlib.Path, directory: pathlib.Path, left_out: _LeftOut) -> list[str]:
    paths, beginning = [], "" if directory == root else directory.relative_to(root).as_posix()
    seen = {_identity(parent) for parent in pathlib.Path(os.path.realpath(directory)).parents}
    for parent, folders, files in os.walk(directory, onerror=_raise, followlinks=True):
        own = _identity(parent)
        if own in seen:  # a link that leads back, or out and up
            folders.clear()
            continue
        seen.add(own)
        folders[:] = left_out.folders_of(pathlib.Path(parent), folders)
        inside = f"{beginning}{parent.removeprefix(os.fspath(directory))}".lstrip("/") or "."
        paths += [f"{inside}/{name}" for name in files if _is_image(name)]
        endings = (os.path.splitext(name)[1].lower() for name in files if not name.startswith("."))
        left_out.formats.update(ending for ending in endings if ending in _NOT_READ)
    return paths


def _identity(directory: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns what is the same for all paths of a directory; much faster than its real path, if it lies deep."""
    found = os.stat(directory)
    return found.st_dev, found.st_ino


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


def shown_name(name: str) -> str:
    """Returns the name of a class for a text: in quotes if it begins or ends with a blank."""
    return name if name == name.strip() else repr(name)


def _listed(names: Iterable[str]) -> str:
    return listed([*map(shown_name, names)], 5)


def _count_classes(names: Collection[str]) -> str:
    return f"{len(names)} {'class' if len(names) == 1 else 'classes'}"
