"""Metadata in the layout of TensorFlow Datasets: dataset_info.json, features.json, class names."""

import pathlib
from collections.abc import Mapping, Sequence

from mixedres._internal.errors import DataError
from mixedres.data.prepare.writer import Written


def write_info(
    directory: pathlib.Path,
    written: Mapping[str, Sequence[Written]],
    *,
    name: str,
    version: str,
    class_names: Sequence[str],
    encoding_format: str | None,
    **about: str,
) -> None:
    """Writes the metadata of a data set whose examples are image, class and file name.

    Args:
      directory: holds the shards.
      written: the contents of the shards of each split.
      name: name of the data set.
      version: version of the data set.
      class_names: names of the classes by label.
      encoding_format: 'jpeg' or 'png'; None if both occur.
      **about: 'description' and 'homepage'.

    Raises:
      DataError: for a split without examples.
    """
    import tensorflow_datasets as tfds

    empty = [split for split, shards in written.items() if not sum(shard.examples for shard in shards)]
    if empty:
        raise DataError(f"no image could be read for {' and '.join(empty)}; nothing was prepared")
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(encoding_format=encoding_format),
            "label": tfds.features.ClassLabel(names=list(class_names)),
            "file_name": tfds.features.Text(),
        }
    )
    files = tfds.core.ShardedFileTemplate(data_dir=directory, dataset_name=name, filetype_suffix="array_record")
    splits = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.examples for shard in shards],
            num_bytes=sum(shard.num_bytes for shard in shards),
            filename_template=files.replace(split=split),
        )
        for split, shards in written.items()
    ]
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=features,
        split_infos=splits,
        version=version,
        check_data=False,
        supervised_keys=("image", "label"),
        **about,
    )
