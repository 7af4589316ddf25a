"""What commands call on images and data sets, as functions of the folder that holds a mutant. Imports no JAX."""

import functools
import pathlib
import tempfile

import numpy as np

from mixedres import data
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, DataError, config_errors
from mixedres.data.datasets.folder import ImageFolder
from mixedres.data.images import chunks, crops, preprocessing

_SIZE = 24
_PREPROCESSINGS = ("official", "official_fast", "torch")


def image(corpus):
    return [predict_image, train_on_image]


def predict_image(place):
    """Reads the image as `mixedres.predict` does."""
    (path,) = place.glob("mutant.*")
    size = path.stat().st_size
    channels, chosen = 1 + 2 * (size % 2), preprocessing.get_preprocessing(_PREPROCESSINGS[size % 3])
    for found in crops.center_crops([path], chosen.input_spec(_SIZE, channels), 1):
        if isinstance(found, str):
            raise ConfigError(f"{path}: {found}")


def train_on_image(place):
    """Reads the image as training and evaluation do."""
    (path,) = place.glob("mutant.*")
    size = path.stat().st_size
    channels, chosen = 1 + 2 * (size // 6 % 2), preprocessing.get_preprocessing(_PREPROCESSINGS[size // 2 % 3])
    images = ImageFolder("images, train", place, [path.name], np.zeros(1, np.int32))
    reader = chunks.ImageReader(images, (_SIZE, _SIZE, channels), chosen, 1, bool(size // 12 % 2), "raise")
    chunks.TrainChunks(reader, 1, range(1), 0, seed=size, flip=True)[0]
    chunks.EvalChunks(reader, 1, range(1))[0]


def cifar(corpus):
    return [load_cifar, refuse_pickle]


def load_cifar(place):
    """Loads the data set as `mixedres.main` does."""
    with config_errors("config.data"):
        data.load("cifar10", dir=str(place), image_size=32, batch_size=1)


def refuse_pickle(place):
    """Checks that a pickle that is no official file is refused; it ends the process if it is opened."""
    (path,) = place.iterdir()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("data_batch_1", "test_batch"):
            pathlib.Path(folder, name).write_bytes(b"cos\nabort\n(tR." + path.read_bytes())
        try:
            load_cifar(folder)
        except ConfigError as error:
            assert "data_batch_1 is not the official file" in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError("a pickle that is no official file is accepted")


def records(corpus):
    """Returns the targets of a data set; its description, which is intact, is read once."""
    import tensorflow_datasets as tfds

    tfds.builder_from_directory = functools.cache(tfds.builder_from_directory)
    return [train_on_records]


def train_on_records(place):
    """Loads the data set as `mixedres.main` does, and reads every image; those that are skipped are printed."""
    with config_errors("config.data"):
        source = data.load("tfds:toy", dir=str(place), image_size=_SIZE, batch_size=1, on_error="skip")
        source.fingerprint  # noqa: B018  (it reads records)
    unreadable = {}
    for part in (source.data_set.train, source.data_set.eval):
        reader = chunks.ImageReader(part, source.image_shape, source.preprocessing, 3, False, "skip")
        if len(part):
            unreadable |= chunks.EvalChunks(reader, len(part), range(len(part)))[0]["unreadable"]
    for name, reason in unreadable.items():
        console.say(f"{name}: {reason}")
    if unreadable:
        raise DataError(f"{len(unreadable)} images cannot be used")
