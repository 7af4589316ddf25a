"""Data sets by name."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from mixedres.data.examples import Dataset, with_background
from mixedres.data.sources import Source, Synthetic

NAMES = ("digits", "cluttered_digits", "synthetic", "cifar10", "imagenet2012", "folder")
PREFIX = "tfds:"
# How synthetic images are normalized.
NORMALIZATIONS = ("raw", "official", "torch", "per_image")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all data sets; each uses those that apply to it.

    Attributes:
      image_size: height and width of an image.
      batch_size: size of the one test batch of synthetic data.
      dir: directory of the data; digits and synthetic data need none.
      difficulty: of cluttered digits.
      channels, train_examples: for synthetic data.
      num_classes: for synthetic data; elsewhere, outputs of the network where they are more than the classes.
      pad, flip: augmentation.
      preprocessing: of stored images: 'official', 'official_fast' or 'torch', see `mixedres.data.images.preprocessing`.
      synthetic_normalization: of synthetic images: 'raw' (as they are, about 127 +- 60), 'official', 'torch' or
        'per_image'; None: that of `preprocessing`.
      background: whether class 0 of stored images is 'background', as in TensorFlow's first ResNets; then the labels
        are one higher, and the network has one output more.
      train_split, eval_split: the parts of a prepared data set or the folders of a folder; None: the usual ones.
      eval_fraction, split_seed: how to divide a folder that has no part for evaluation.
      threads: decoding threads per decoding process; None: as many in all as there are CPU cores.
      workers: decoding processes; 0: threads of this process decode.
      on_error: what to do with an image that cannot be read: 'raise' or 'skip'.
      max_pixels: that a stored image may have; a larger one cannot be read. None: 178,956,970, the limit.
    """

    image_size: int
    batch_size: int
    dir: str | None = None
    difficulty: float = 1.0
    channels: int = 3
    num_classes: int | None = None
    train_examples: int | None = None
    pad: int = 0
    flip: bool = False
    preprocessing: str = "torch"
    synthetic_normalization: str | None = None
    background: bool = False
    train_split: str | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.2
    split_seed: int = 0
    threads: int | None = None
    workers: int = 0
    on_error: str = "raise"
    max_pixels: int | None = None


def load(name: str, **options: Any) -> Source:
    """The data set called `name`: one of `NAMES`, or 'tfds:' and the name of any data set that was prepared.

    Args:
      name: of the data set.
      **options: the fields of `Options`.

    Raises:
      ValueError: for an unknown name, and for data that is not there or cannot be used; the message says what to do.
    """
    given = Options(**options)
    for field, least in (("image_size", 1), ("threads", 1), ("workers", 0), ("max_pixels", 1)):
        value = getattr(given, field)
        if value is not None and value < least:
            raise ValueError(f"{field} must be >= {least}, got {value}")
    if name == "digits":
        from mixedres.data.datasets import digits

        return digits.load(image_size=given.image_size, pad=given.pad, flip=given.flip)
    if name == "cluttered_digits":
        from mixedres.data.datasets import cluttered_digits

        return cluttered_digits.load(image_size=given.image_size, difficulty=given.difficulty)
    if name == "synthetic":
        return _synthetic(given)
    if name == "cifar10":
        from mixedres.data.datasets import cifar10

        return cifar10.load(given.dir, image_size=given.image_size, pad=given.pad, flip=given.flip)
    if name in ("folder", "imagenet2012") or name.startswith(PREFIX):
        try:
            return _images(name, given)
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"data set {name!r} is unknown; {hint}use one of {', '.join(NAMES)}, or {PREFIX}NAME")


def _synthetic(given: Options) -> Source:
    if given.num_classes is None or given.train_examples is None:
        raise ValueError(
            "synthetic data needs num_classes and train_examples; add --config.data.num_classes=10 and "
            "--config.data.train_examples=50000, say"
        )
    mean, std = _synthetic_normalization(given)
    return Synthetic(
        image_shape=(given.image_size, given.image_size, given.channels),
        num_classes=given.num_classes,
        train_examples=given.train_examples,
        eval_examples=given.batch_size,
        mean=mean,
        std=std,
    )


def _synthetic_normalization(given: Options) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and deviation per channel; None for 'per_image'."""
    from mixedres.data.images import preprocessing

    name = given.synthetic_normalization or given.preprocessing
    if given.synthetic_normalization not in (None, *NORMALIZATIONS):
        raise ValueError(f"synthetic_normalization is {name!r}; it must be {' or '.join(NORMALIZATIONS)}")
    if name == "raw":
        return (0.0,) * given.channels, (1.0,) * given.channels
    if name == "per_image":
        return None, None
    return preprocessing.get_preprocessing(name).normalization(given.channels)


def _images(name: str, given: Options) -> Source:
    """A loader of stored images."""
    from mixedres.data.datasets import folder, tfds
    from mixedres.data.images import decoding, loader, preprocessing, worker_processes

    if given.on_error not in loader.ON_ERROR:
        raise ValueError(f"on_error is {given.on_error!r}; it must be {' or '.join(loader.ON_ERROR)}")
    chosen = preprocessing.get_preprocessing(given.preprocessing)
    splits = {"train_split": given.train_split, "eval_split": given.eval_split}
    if name == "folder":
        if given.dir is None:
            raise ValueError("data.dir is not set; name the folder of images with --config.data.dir=DIR")
        data_set = folder.scan(given.dir, **splits, eval_fraction=given.eval_fraction, split_seed=given.split_seed)
    else:
        data_set = tfds.open_data_set(name.removeprefix(PREFIX), given.dir, **splits)
    if given.background:
        data_set = with_background(data_set)
    data_set = dataclasses.replace(data_set, note="; ".join(filter(None, _notes(data_set, given))))
    classes = len(data_set.class_names)
    if given.num_classes is not None and given.num_classes < classes:
        raise ValueError(
            f"num_classes is {given.num_classes}, but the data has {classes} classes"
            f"{' with the background' if given.background else ''}; set --config.data.num_classes={classes}, or more"
        )
    cpus = worker_processes.available_cpus()
    return loader.Loader(
        data_set,
        given.image_size,
        chosen,
        given.num_classes or classes,
        flip=given.flip,
        threads=given.threads or max(1, cpus // max(1, given.workers)),
        workers=given.workers,
        on_error=given.on_error,
        max_pixels=min(given.max_pixels or decoding.MAX_PIXELS, decoding.MAX_PIXELS),
    )


def _notes(data_set: Dataset, given: Options) -> Iterator[str]:
    """Lines about the data that a person should read before a run."""
    yield data_set.note
    if given.num_classes is not None and given.num_classes > len(data_set.class_names):
        yield f"the network has {given.num_classes} outputs for {len(data_set.class_names)} classes (data.num_classes)"
    train, test = data_set.train, data_set.eval
    if len(train) == len(test) and train.fingerprint() == test.fingerprint():
        yield "the test examples are the training examples"
