"""Report on a folder of photographs: what is damaged, what is there twice, and what the images are."""

import collections
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mixedres._internal.environment import has_accelerator
from mixedres._internal.errors import listed
from mixedres._internal.formats import stamped
from mixedres._internal.types import Record
from mixedres.data import Dataset, ImageFolder, shown_name
from mixedres.photographs.inspection import Facts, doubts, hash_of_pixels, inspect_files

PARTS = ("train", "eval")
# A class with fewer training images is listed: such a class is hardly learned from scratch.
FEW_IMAGES = 20
# Batch size of configs/folder.py.
_RECIPE_BATCH = 64
# Twins, and classes, that the text lists; the JSON document has all.
_MOST_LISTED = 50


# A file of the report: 'file' (the path below the folder), 'part' ('train' or 'eval') and 'class'.
Image: TypeAlias = dict[str, str]


@dataclasses.dataclass(frozen=True)
class FolderReport:
    """Result of a check; the fields are the keys of the command's JSON."""

    root: str
    note: str
    classes: dict[str, dict[str, int]]  # {part: {class: number of images}}
    empty: list[str]  # class folders without an image, below the root
    damaged: list[dict[str, str]]  # with reasons
    doubts: list[str]  # with reasons
    twins: list[Record]  # groups of equal images
    sizes: dict[str, list[int]]  # [width, height] by the number of pixels
    modes: dict[str, int]
    orientations: dict[str, int]  # without 1, upright

    def twins_between(self, kind: str) -> list[Record]:
        """Returns the twins that are in both parts, for 'part', or in several classes, for 'class'."""
        return [group for group in self.twins if len({image[kind] for image in group["images"]}) > 1]

    @property
    def few(self) -> dict[str, int]:
        """Returns {class: number} of fewer than `FEW_IMAGES` training images, but for classes without any image."""
        train, test = (self.classes[part] for part in PARTS)
        return {name: count for name, count in train.items() if count < FEW_IMAGES and count + test[name]}

    @property
    def problems(self) -> list[str]:
        """Returns what makes the folder unfit for training or evaluation, in words; empty if nothing does."""
        lines = []
        if self.empty:
            lines.append(f"{_count(len(self.empty), 'class folder')} without an image")
        if self.damaged:
            lines.append(f"{_count(len(self.damaged), 'damaged file')}")
        if both := self.twins_between("part"):
            lines.append(f"{_count(len(both), 'image')} in both parts")
        return lines

    def to_json(self) -> Record:
        """Returns the report as one JSON document, with the number of the format."""
        return stamped(dataclasses.asdict(self) | {"few_images": self.few, "problems": self.problems})

    def lines(self, directory: str, division: Mapping[str, object]) -> Iterator[str]:
        """Yields the report as text, with the command to type next; `division` are options other than the defaults."""
        total = sum(sum(counts.values()) for counts in self.classes.values())
        yield f"{self.root}: {total:,} images; {self.note}"
        yield from _table(self.classes)
        if self.few:
            names = listed([f"{shown_name(name)} ({count})" for name, count in self.few.items()], 10)
            yield f"classes with fewer than {FEW_IMAGES} training images: {names}"
        if self.empty:
            names = listed([*map(shown_name, self.empty)], _MOST_LISTED)
            yield f"{_count(len(self.empty), 'class folder')} without an image: {names}"
        if self.damaged:
            yield f"{_count(len(self.damaged), 'damaged file')}:"
            yield from (f"  {image['file']}: {image['reason']}" for image in self.damaged)
        yield from self.doubts
        yield from self._twins()
        if self.sizes:
            sizes = (f"{name} {width}x{height}" for name, (width, height) in self.sizes.items())
            yield f"sizes: {', '.join(sizes)}"
            yield f"modes: {_counts(self.modes)}"
        if self.orientations:
            yield f"EXIF orientations: {_counts(self.orientations)}; these images are turned upright"
        if self.problems:
            flags = "".join(f" --{name}={shlex.quote(str(value))}" for name, value in division.items())
            todo = ["fill the empty class folders, or move them away"] * bool(self.empty)
            todo += ["repair or remove these files"] * bool(self.damaged or self.twins_between("part"))
            yield f"next: {', '.join(todo)}, then type: mixedres check {shlex.quote(directory)}{flags}"
        else:
            yield from _next(directory, division, sum(self.classes["train"].values()))

    def _twins(self) -> Iterator[str]:
        both, others = self.twins_between("part"), self.twins_between("class")
        within = [group for group in self.twins if group not in both and group not in others]
        for groups, words in (
            (both, "in the training part and in the test part, which makes the accuracy look better"),
            ([group for group in others if group not in both], "in two classes, of which one is wrong"),
            (within, "more than once in one part"),
        ):
            if groups:
                yield f"{_count(len(groups), 'image')} {words}:"
                for group in groups[:_MOST_LISTED]:
                    names = " = ".join(image["file"] for image in group["images"][:5])
                    yield f"  {names}{' ...' if len(group['images']) > 5 else ''} (equal {group['equal']})"
                if len(groups) > _MOST_LISTED:
                    yield f"  and {len(groups) - _MOST_LISTED:,} more; --json lists all"


def check_folder(data_set: Dataset, empty: list[str], max_pixels: int) -> FolderReport:
    """Decodes every image of a folder, and returns the report; `empty` are class folders without an image."""
    parts = [part for part in (data_set.train, data_set.eval) if isinstance(part, ImageFolder)]
    images = [
        {"file": path, "part": name, "class": data_set.class_names[label]}
        for name, part in zip(PARTS, parts, strict=True)
        for path, label in zip(part.paths, part.labels.tolist(), strict=True)
    ]
    root = parts[0].root
    facts = list(inspect_files([f"{root}/{image['file']}" for image in images], max_pixels))
    names = data_set.class_names
    counts = [np.bincount(part.labels, minlength=len(names)).tolist() for part in parts]
    usable = [known for known in facts if not known.problem]
    by_size = sorted((known.height * known.width, known.width, known.height) for known in usable)
    places = {"smallest": 0, "median": len(by_size) // 2, "largest": -1} if by_size else {}
    orientations = collections.Counter(str(known.orientation) for known in usable if known.orientation != 1)
    damaged = [image | {"reason": known.problem} for image, known in zip(images, facts, strict=True) if known.problem]
    return FolderReport(
        root=str(root),
        note=data_set.note,
        classes={part: dict(zip(names, of_part, strict=True)) for part, of_part in zip(PARTS, counts, strict=True)},
        empty=empty,
        damaged=damaged,
        doubts=[*doubts({image["file"]: known for image, known in zip(images, facts, strict=True)})],
        twins=_find_twins(str(root), images, facts),
        sizes={name: list(by_size[place][1:]) for name, place in places.items()},
        modes=dict(collections.Counter(known.mode for known in usable).most_common()),
        orientations=dict(sorted(orientations.items())),
    )


def _find_twins(root: str, images: Sequence[Image], facts: Sequence[Facts]) -> list[Record]:
    """Returns the groups of images with equal pixels, in the order of their first images."""
    alike = collections.defaultdict(list)
    for image, known in zip(images, facts, strict=True):
        if not known.problem:
            alike[known.height, known.width, known.pixels].append((known.file, image))
    groups: list[Record] = []
    for candidates in alike.values():
        if len(candidates) == 1:
            continue
        equal = collections.defaultdict(list)
        # Equal files have equal pixels. Others are compared in full size: one file of each content is decoded.
        contents = dict(candidates)
        pixels = {}
        if len(contents) > 1:
            pixels = {file: hash_of_pixels(f"{root}/{image['file']}") for file, image in contents.items()}
        for file, image in candidates:
            equal[pixels.get(file, file)].append((file, image))
        for same in equal.values():
            if len(same) > 1:
                kind = "files" if len({file for file, _ in same}) == 1 else "pixels"
                groups.append({"equal": kind, "images": [image for _, image in same]})
    return groups


def _table(classes: dict[str, dict[str, int]]) -> Iterator[str]:
    train, test = (classes[part] for part in PARTS)
    shown = [*train]
    if len(train) > _MOST_LISTED:
        shown.sort(key=lambda name: train[name])
        shown = shown[: _MOST_LISTED // 2] + shown[-_MOST_LISTED // 2 :]
    width = max(8, *(len(shown_name(name)) for name in shown))
    yield f"  {'class':<{width}}  {'training':>9}  {'test':>9}"
    for name in shown:
        yield f"  {shown_name(name):<{width}}  {train[name]:>9,}  {test[name]:>9,}"
    if len(shown) < len(train):
        yield f"  (the smallest and the largest of {len(train):,} classes; --json lists all)"
    yield f"  {'all':<{width}}  {sum(train.values()):>9,}  {sum(test.values()):>9,}"


def _next(directory: str, division: Mapping[str, object], images: int) -> Iterator[str]:
    """Yields the commands that train on the folder, on a GPU and without one; a batch has no more than all images."""
    flags = f" --config.data.dir={shlex.quote(directory)}"
    flags += "".join(f" --config.data.{name}={shlex.quote(str(value))}" for name, value in division.items())
    fitting = 2 ** (images.bit_length() - 1)
    size = "" if images >= _RECIPE_BATCH else f" --config.batch_size={fitting}"
    large = f"mixedres train --config=folder:fp16{flags}{size}"
    small = f"mixedres train --config=folder:fp32,model=cifar_resnet8{flags} --config.data.image_size=32"
    small = f"{small} --config.batch_size={min(32, fitting)}"
    here, there = (large, f"without a GPU: {small}") if has_accelerator() else (small, f"on a GPU: {large}")
    yield f"next: {here}"
    yield there


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
