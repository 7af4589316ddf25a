"""What commands call on images and data sets, as functions of the folder that holds a mutant. Imports no JAX."""

import functools

from mixedres import data
from mixedres._internal import console
from mixedres._internal.errors import ConfigError, DataError, errors
from mixedres.data.examples import Example
from mixedres.data.images import center_crop, chunks, preprocessing

_SIZE = 24
_PREPROCESSINGS = ("official", "official_fast", "torch")


class _OneImage:
    """Examples: one image file."""

    name = "images, train"

    def __init__(self, content):
        self._content = content

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Example(self._content, 0)

    def file_name(self, index):
        return "image"


def image(corpus):
    return [predict_image, train_on_image]


def predict_image(place):
    """Reads the image as `mixedres.predict` does."""
    (path,) = place.iterdir()
    size = path.stat().st_size
    channels, chosen = 1 + 2 * (size % 2), preprocessing.get(_PREPROCESSINGS[size % 3])
    for found in center_crop.center_crops([path], chosen.input_spec(_SIZE, channels), 1):
        if isinstance(found, str):
            raise ConfigError(f"{path}: {found}")


def train_on_image(place):
    """Reads the image as training and evaluation do."""
    (path,) = place.iterdir()
    content = path.read_bytes()
    chosen = preprocessing.get(_PREPROCESSINGS[len(content) // 2 % 3])
    channels, with_exif = 1 + 2 * (len(content) // 6 % 2), bool(len(content) // 12 % 2)
    reader = chunks.ImageReader(_OneImage(content), (_SIZE, _SIZE, channels), chosen, 1, with_exif, "raise")
    chunks.TrainChunks(reader, 1, range(1), 0, seed=len(content), flip=True)[0]
    chunks.EvalChunks(reader, 1, range(1))[0]


def cifar(corpus):
    return [train_on_cifar]


def train_on_cifar(place):
    """Loads the data set as `mixedres.main` does."""
    with errors("config.data"):
        data.load("cifar10", dir=str(place), image_size=32, batch_size=1)


def records(corpus):
    """The targets of a data set whose description, which is intact, is read once."""
    import tensorflow_datasets as tfds

    tfds.builder_from_directory = functools.cache(tfds.builder_from_directory)
    return [train_on_records]


def train_on_records(place):
    """Loads the data set as `mixedres.main` does, and reads every image; those that are skipped are printed."""
    with errors("config.data"):
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
