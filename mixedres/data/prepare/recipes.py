"""The data set that each command writes: its images, their conversion, its name."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from mixedres._internal.errors import ConfigError
from mixedres.data.prepare import folder, imagenet, metadata, reencode, spans
from mixedres.data.prepare.writer import Recipe, Split, final_directory


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of all commands.

    Attributes:
      short_side: short side of smaller copies, in pixels; None: store the originals.
      quality: JPEG quality of smaller copies, 1 to 100.
      skip_unreadable: leave out images that cannot be read, instead of stopping.
    """

    short_side: int | None = None
    quality: int = 90
    skip_unreadable: bool = False

    def name(self, name: str) -> str:
        """The name of the data set, which tells smaller copies from the originals."""
        return name if self.short_side is None else f"{name}_short{self.short_side}_q{self.quality}"

    def origin(self, source: pathlib.Path) -> dict[str, Any]:
        """The plan without the splits; `skip_unreadable` is not in it, so that a stopped start can continue with it."""
        quality = None if self.short_side is None else self.quality
        return {"source": str(source), "short_side": self.short_side, "quality": quality}

    def splits(
        self, found: Mapping[str, spans.ImageSpans], otherwise: reencode.Convert, *, turn: bool
    ) -> dict[str, Split]:
        """The splits with these images; see `reencode.converter`."""
        convert = reencode.converter(otherwise, turn=turn, short_side=self.short_side, quality=self.quality)
        return {
            name: spans.split(part, name, convert, skip_unreadable=self.skip_unreadable) for name, part in found.items()
        }


def imagenet_from_tars(manual_dir: pathlib.Path, data_dir: pathlib.Path, options: Options, *, partial: bool) -> Recipe:
    """ImageNet from its tar files; for the errors see `imagenet.from_tars`."""
    _check_directory(manual_dir)
    name = options.name(imagenet.NAME)
    final_directory(data_dir, name, imagenet.VERSION)  # before the work of finding the images
    found = imagenet.from_tars(manual_dir, partial=partial)
    write_info = functools.partial(
        metadata.write_info,
        name=name,
        version=imagenet.VERSION,
        class_names=imagenet.class_names(),
        encoding_format="jpeg",
        description="ImageNet, the ILSVRC 2012 classification data set",
        homepage=imagenet.HOMEPAGE,
    )
    splits = options.splits(found, reencode.repaired, turn=False)  # the published pipelines ignore EXIF orientation
    return Recipe(name, imagenet.VERSION, options.origin(manual_dir), splits, write_info)


def images_of_folder(
    source: pathlib.Path, data_dir: pathlib.Path, options: Options, *, name: str, **parts: Any
) -> Recipe:
    """A folder of images; for `parts` and the errors see `folder.from_folder`."""
    _check_directory(source)
    if source.resolve() in (data_dir.resolve(), *data_dir.resolve().parents):
        raise ConfigError(
            f"--data_dir={data_dir} lies in {source}, where it would become one of its classes; name another"
        )
    name = options.name(name)
    final_directory(data_dir, name, folder.VERSION)
    found, class_names = folder.from_folder(source, **parts)
    write_info = functools.partial(
        metadata.write_info,
        name=name,
        version=folder.VERSION,
        class_names=class_names,
        encoding_format=None,  # JPEG and PNG may both occur
        description=f"The images of the folder {source.name}",
    )
    splits = options.splits(found, reencode.upright, turn=True)
    return Recipe(name, folder.VERSION, options.origin(source) | parts, splits, write_info)


def _check_directory(path: pathlib.Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory")
