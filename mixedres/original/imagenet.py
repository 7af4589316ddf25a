"""Facts about ImageNet (ILSVRC 2012) and its copies."""

import functools
import pathlib
import re

NAME = "imagenet2012"
COUNTS = {"train": 1_281_167, "validation": 50_000}

# The layout that TensorFlow's models repository writes: the features with image, label and file name; the first label
# (0 is the background); the names of the files.
MODELS_FEATURES = ("image/encoded", "image/class/label", "image/filename")
MODELS_FIRST_LABEL = 1
_MODELS_FILE = re.compile(r"(train|validation)-(\d{5})-of-(\d{5})")


@functools.cache
def class_names() -> tuple[str, ...]:
    """Returns the 1000 WordNet ids such as 'n01440764', by label."""
    import tensorflow_datasets as tfds

    return tuple(tfds.core.tfds_path("datasets/imagenet2012/labels.txt").read_text().split())


def models_files(directory: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns {split: files in order} of a copy in the models repository's layout, or {}; refuses several copies."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    matches = [match for path in paths if (match := _MODELS_FILE.fullmatch(path.name))]
    splits = {}
    for split in dict.fromkeys(match[1] for match in matches):
        (count, *others) = sorted({match[3] for match in matches if match[1] == split})
        if others:
            raise ValueError(f"{directory} holds {split} files of several copies: of {count} and of {others[0]}")
        files = [directory / f"{split}-{index:05d}-of-{count}" for index in range(int(count))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(
                f"{directory} has {len(files) - len(missing)} of the {len(files)} TFRecord files of {split}; it lacks "
                f"{len(missing)} of {len(files)} files, the first is {missing[0]}"
            )
        splits[split] = files
    return splits
