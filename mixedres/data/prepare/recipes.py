"""Recipes of the data sets that the command writes: images, their conversion, name."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from mixedres._internal.errors import ConfigError
from mixedres._internal.types import Record
from mixedres.data.datasets.imagenet import NAME, class_names
from mixedres.data.prepare import folder, imagenet, metadata, reencode, spans
from mixedres.data.prepare.writer import Recipe, Split, final_directory


@dataclasses.dataclass(frozen=True)
class StoredImages:
    """Options for the stored images of every data set.

    Attributes:
      short_side: short side of smaller copies, in pixels; None: store the originals.
      quality: JPEG quality of smaller copies, 1 to 100.
      skip_unreadable: leave out images that cannot be read, instead of stopping.
    """

    short_side: int | None = None
    quality: int = 90
    skip_unreadable: bool = False

    def name(self, name: str) -> str:
        """Returns the name of the data set; smaller copies have a name of their own."""
        return name if self.short_side is None else f"{name}_short{self.short_side}_q{self.quality}"

    def origin(self, source: pathlib.Path) -> Record:
        """Returns the plan without the splits.

        `skip_unreadable` is not part of the plan, so that a start that stopped at an image can continue with it.
        """
        quality = None if self.short_side is None else self.quality
        return {"source": str(source), "short_side": self.short_side, "quality": quality}

    def splits(
        self, images: Mapping[str, spans.ImageSpans], otherwise: reencode.Convert, *, turn: bool
    ) -> dict[str, Split]:
        """Returns the splits with these images; for `otherwise` and `turn` see `reencode.converter`."""
        convert = reencode.converter(otherwise, turn=turn, short_side=self.short_side, quality=self.quality)
        return {
            name: spans.make_split(part, name, convert, skip_unreadable=self.skip_unreadable)
            for name, part in images.items()
        }


def imagenet_from_tars(
    manual_dir: pathlib.Path, data_dir: pathlib.Path, options: StoredImages, *, partial: bool
) -> Recipe:
    """Returns the recipe of ImageNet from its tar files; raises the errors of `imagenet.from_tars`."""
    _check_directory(manual_dir)
    name = options.name(NAME)
    final_directory(data_dir, name, imagenet.VERSION)  # before the work of finding the images
    images = imagenet.from_tars(manual_dir, partial=partial)
    write_info = functools.partial(
        metadata.write_info,
        name=name,
        version=imagenet.VERSION,
        class_names=class_names(),
        encoding_format="jpeg",
        description="ImageNet, the ILSVRC 2012 classification data set",
        homepage=imagenet.HOMEPAGE,
    )
    splits = options.splits(images, reencode.repaired, turn=False)  # the published pipelines ignore EXIF orientation
    return Recipe(name, imagenet.VERSION, options.origin(manual_dir), splits, write_info)


def images_of_folder(
    source: pathlib.Path,
    data_dir: pathlib.Path,
    options: StoredImages,
    *,
    name: str,
    train_split: str | None,
    eval_split: str | None,
    eval_fraction: float,
    split_seed: int,
) -> Recipe:
    """Returns the recipe of a folder of images; for the other arguments and the errors see `folder.from_folder`."""
    _check_directory(source)
    if source.resolve() in (data_dir.resolve(), *data_dir.resolve().parents):
        raise ConfigError(
            f"--data_dir={data_dir} lies in {source}, where it would become one of its classes; name another"
        )
    name = options.name(name)
    final_directory(data_dir, name, folder.VERSION)
    images, names = folder.from_folder(
        source, train_split=train_split, eval_split=eval_split, eval_fraction=eval_fraction, split_seed=split_seed
    )
    write_info = functools.partial(
        metadata.write_info,
        name=name,
        version=folder.VERSION,
        class_names=names,
        encoding_format=None,  # JPEG and PNG may both occur
        description=f"The images of the folder {source.name}",
    )
    parts = {
        "train_split": train_split,
        "eval_split": eval_split,
        "eval_fraction": eval_fraction,
        "split_seed": split_seed,
    }
    splits = options.splits(images, reencode.upright, turn=True)
    return Recipe(name, folder.VERSION, options.origin(source) | parts, splits, write_info)


def _check_directory(path: pathlib.Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory")
