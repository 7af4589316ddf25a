"""Prepared data sets: data sets in the layout of TensorFlow Datasets, opened by name."""

import os
import pathlib
import re
from typing import TYPE_CHECKING

from mixedres._internal.errors import one_line
from mixedres.data import Dataset
from mixedres.original import imagenet, records, tfds_metadata

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

EVAL_SPLITS = ("validation", "test", "val")
_FORMATS = ("array_record", "tfrecord")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def open_data_set(
    name: str, root: pathlib.Path, train_split: str | None = None, eval_split: str | None = None
) -> Dataset:
    """Opens the prepared data set `name`, NAME[/CONFIG][:VERSION], below `root`; decodes no image.

    Splits are in TensorFlow Datasets' notation; the default for evaluation is the first of 'validation', 'test' and
    'val'. Raises ValueError, which says what to type, if the data set does not exist or is of another kind.
    """
    if name == imagenet.NAME and (files := imagenet.models_files(root)):
        return _open_models_layout(root, files, train_split, eval_split)
    directory = find_data_set(name, root)
    # Old versions of TensorFlow Datasets did not name their only format.
    file_format = tfds_metadata.read_info(directory).get("fileFormat", "tfrecord")
    if file_format not in _FORMATS:
        raise ValueError(f"{directory} is stored as {file_format}; {' and '.join(_FORMATS)} can be read")
    builder = _builder(directory)
    keys, class_names, channels = _features(directory, builder.info.features)
    splits = list(builder.info.splits)
    if eval_split is None:
        eval_split = next((split for split in EVAL_SPLITS if split in splits), None)
    if eval_split is None:
        raise ValueError(
            f"{directory} has no part for evaluation, only {', '.join(splits)}; divide it, such as "
            "--config.data.train_split='train[:90%]' --config.data.eval_split='train[90%:]'"
        )

    train_split = train_split or "train"
    parts = {split: _parts(builder, split, directory) for split in (train_split, eval_split)}

    def opened(split: str) -> records.Records:
        files, paths = _files(builder, split, file_format, parts[split]), tuple(part.path for part in parts[split])
        return records.Records(f"{name}, {split}", files, keys, paths)

    train, test = opened(train_split), opened(eval_split)
    notes = []
    if name == imagenet.NAME and (train_split, eval_split) == ("train", "validation"):
        notes += [
            f"{len(part):,} of ImageNet's {imagenet.COUNTS[split]:,} {kind} images"
            for part, split, kind in ((train, train_split, "training"), (test, eval_split, "validation"))
            if len(part) != imagenet.COUNTS[split]
        ]
    if _overlap(parts[train_split], parts[eval_split]):
        notes.append("test examples are among the training examples")
    return Dataset(train, test, class_names, channels, note="; ".join(notes))


def find_data_set(name: str, root: pathlib.Path) -> pathlib.Path:
    """Returns the directory of the newest version of data set `name` under `root`; raises ValueError without one."""
    path, _, version = name.partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise ValueError(
            f"{path!r} is no name of a prepared data set; write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:1.2.0"
        )
    base = root / path
    found = [info for info in base.glob("*/dataset_info.json") if _VERSION.fullmatch(info.parent.name)]
    versions = sorted(found, key=lambda info: [int(number) for number in info.parent.name.split(".")])
    matching = [info for info in versions if version in ("", info.parent.name)]
    if matching:
        return matching[-1].parent
    if versions:
        others = ", ".join(info.parent.name for info in versions)
        raise ValueError(f"data set {path!r} in {root} has no version {version}, only {others}")
    configs = sorted({info.parent.parent.name for info in base.glob("*/*/dataset_info.json")})
    if configs and not version:
        raise ValueError(f"data set {path!r} in {root} has configs; choose one, as in tfds:{path}/{configs[0]}")
    raise ValueError(_missing(path, root, version))


def _missing(name: str, root: pathlib.Path, version: str) -> str:
    base = root / name
    looked = f"data set {name!r} is not prepared: no {base / (version or 'VERSION') / 'dataset_info.json'}"
    if (root / "dataset_info.json").exists():
        return f"{looked}; {root} is a data set itself: give the directory above its name as --config.data.dir"
    if stray := next((path for path in (*root.glob("*tfrecord*"), *base.rglob("*tfrecord*"))), None):
        looked += f" ({stray.parent} holds TFRecord files, but not the dataset_info.json that describes them)"
    elsewhere = "or name another place with --config.data.dir=DIR or TFDS_DATA_DIR"
    if name == imagenet.NAME:
        return (
            f"{looked}. Register at image-net.org, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar to one "
            f"directory, and run where TensorFlow is installed: tfds build {imagenet.NAME} --manual_dir=THAT_DIRECTORY "
            f"--file_format=array_record --data_dir={root}; {elsewhere}"
        )
    return (
        f"{looked}. Write it once with TensorFlow Datasets, where TensorFlow is installed: tfds build {name} "
        f"--file_format=array_record --data_dir={root}; {elsewhere}"
    )


def _features(
    directory: pathlib.Path, features: "tfds.features.FeaturesDict"
) -> tuple[records.Keys, tuple[str, ...], int]:
    """Returns the keys of image and label in a record, the names of the classes, and the channels of the images."""
    import tensorflow_datasets as tfds

    images = [key for key, feature in features.items() if isinstance(feature, tfds.features.Image)]
    labels = [key for key, feature in features.items() if isinstance(feature, tfds.features.ClassLabel)]
    image, label = _the_one(images, "image"), _the_one(labels, "label")
    if image is None or label is None:
        held = ", ".join(f"{key}: {type(feature).__name__}" for key, feature in sorted(features.items()))
        raise ValueError(f"{directory} is not for the classification of images; its features are {held}")
    channels = features[image].shape[-1]
    if channels not in (1, 3):
        raise ValueError(f"{directory} has images with {channels} channels; 1 and 3 can be trained on")
    classes = features[label]
    if not 1 <= (classes.num_classes or 0) <= tfds_metadata.MOST_CLASSES:
        raise ValueError(
            f"{directory} has {classes.num_classes} classes; from 1 to {tfds_metadata.MOST_CLASSES:,} are read"
        )
    names = tuple(classes.names or map(str, range(classes.num_classes)))
    return records.Keys(image, label, "file_name" if "file_name" in features else None), names, channels


def _the_one(keys: list[str], usual: str) -> str | None:
    return usual if usual in keys else keys[0] if len(keys) == 1 else None


def _builder(directory: pathlib.Path) -> "tfds.core.DatasetBuilder":
    """Returns TensorFlow Datasets' builder of a data set whose metadata were checked."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(directory)
        dict(builder.info.features.items())
        list(builder.info.splits)
    except Exception as error:  # TensorFlow Datasets raises many types of errors
        raise ValueError(
            f"the metadata in {directory} cannot be read ({one_line(error)}); copy or prepare the data set again"
        ) from error
    return builder


def _overlap(one: list[records.Part], other: list[records.Part]) -> bool:
    """Returns whether two splits share examples."""
    spans = {part.path: (part.skip, part.skip + (part.take or 0)) for part in one}
    return any(
        max(spans[part.path][0], part.skip) < min(spans[part.path][1], part.skip + (part.take or 0))
        for part in other
        if part.path in spans
    )


def _parts(builder: "tfds.core.DatasetBuilder", split: str, directory: pathlib.Path) -> list[records.Part]:
    """Returns the files and records of a split."""
    try:
        instructions = builder.info.splits[split].file_instructions
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"split {split!r} of {directory}: {one_line(error)} It has {', '.join(builder.info.splits)}"
        ) from error
    if not instructions:
        raise ValueError(f"split {split!r} of {directory} has no examples")
    parts = [
        records.Part(
            str(part.filename),
            part.skip,
            part.take if part.take >= 0 else part.examples_in_shard - part.skip,
            part.examples_in_shard,
        )
        for part in instructions
    ]
    missing = [part.path for part in parts if not os.path.exists(part.path)]
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} of the {len(parts)} files of {split}, such as {missing[0]}")
    tfds_metadata.check_files([part.path for part in parts], sum(part.total or 0 for part in parts), directory)
    return parts


def _files(
    builder: "tfds.core.DatasetBuilder", split: str, file_format: str, parts: list[records.Part]
) -> records.Files:
    import tensorflow_datasets as tfds

    records.allow_open_files(len(parts) + 256)
    if file_format == "tfrecord":
        return records.TFRecordFiles(parts)
    raw_bytes = tfds.decode.DeserializeMethod.RAW_BYTES
    source: records.Files = builder.as_data_source(split, deserialize_method=raw_bytes)
    return source


def _open_models_layout(
    root: pathlib.Path, files: dict[str, list[pathlib.Path]], train_split: str | None, eval_split: str | None
) -> Dataset:
    def part(split: str) -> records.Records:
        if split not in files:
            raise ValueError(f"the TFRecord files in {root} have no split {split!r}, only {', '.join(sorted(files))}")
        paths = tuple(map(str, files[split]))
        of_split = records.TFRecordFiles([records.Part(path) for path in paths])
        keys = records.Keys(*imagenet.MODELS_FEATURES, first_label=imagenet.MODELS_FIRST_LABEL)
        return records.Records(f"{imagenet.NAME}, {split}", of_split, keys, paths)

    return Dataset(part(train_split or "train"), part(eval_split or "validation"), imagenet.class_names())
