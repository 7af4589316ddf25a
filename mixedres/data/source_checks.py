"""Checks of what a source promises: its attributes, and every batch, before a compiled step gets it."""

from collections.abc import Iterator

import numpy as np

from mixedres._internal.errors import DataError
from mixedres.data.sources import Batch, Source


def check_labels(batch: Batch, num_classes: int, name: str) -> None:
    """Checks the labels of a batch, because XLA checks no index: a label of -1 trains the last class.

    Raises DataError for a label that is no integer or not in [0, num_classes); `name` is the name of the data set. Rows
    that the mask leaves out do not count.
    """
    labels = batch["label"]
    if labels.dtype not in (np.int32, np.int64):
        raise DataError(
            f"data set {name}: its labels are {labels.dtype}; they must be int32, as of labels.astype('int32')"
        )
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any() and (outside := outside & batch.get("mask", True)).any():
        row = np.flatnonzero(outside)[0]
        raise DataError(
            f"data set {name}: the label {labels[row]} of image {row} in a batch is not in 0 to {num_classes - 1}; "
            "correct the label, or give the data set more classes"
        )


def check_source(source: Source) -> None:
    """Raises ValueError if an object lacks an attribute or a method of `Source`, or has a wrong one."""
    wanted = (*Source.__annotations__, "fingerprint", "train_batches", "eval_batches")
    if missing := [name for name in wanted if not hasattr(source, name)]:
        raise ValueError(f"it has no {', '.join(missing)}; derive the class from mixedres.data.DataInfo")
    shape, names = source.image_shape, source.class_names
    is_text = isinstance(source.fingerprint, str) and source.fingerprint
    for right, attribute, must_be in (
        (is_text, "fingerprint", "a text that changes with the data"),
        (len(shape) == 3 and all(side >= 1 for side in shape), "image_shape", "(height, width, channels)"),
        (len(names) in (0, source.num_classes), "class_names", f"{source.num_classes} names, or none"),
        ((source.mean is None) == (source.std is None), "mean", "given with std, or not at all"),
        (source.mean is None or len(source.mean) == shape[-1], "mean", "one number per channel"),
    ):
        if not right:
            raise ValueError(f"{attribute} is {getattr(source, attribute)!r}; it must be {must_be}")
    if not hasattr(source, "input_spec"):  # which raises ValueError for the mistakes above
        raise ValueError("it has no input_spec; derive the class from mixedres.data.DataInfo")


def check_batch(batch: Batch, source: Source, name: str, rows: int, *, has_mask: bool) -> None:
    """Checks a batch of `rows` examples, before a compiled step gets it.

    Raises DataError if the batch has other arrays than `Source` asks for, in another shape or dtype, or a label out of
    range; `name` is the name of the data set, and `has_mask` is for batches of an evaluation.
    """
    names = ("image", "label", "mask") if has_mask else ("image", "label")
    if not isinstance(batch, dict) or not set(names) <= batch.keys():
        given = ", ".join(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise DataError(f"data set {name}: a batch is {given}; it must be a dictionary with {', '.join(names)}")
    kinds = {"image": (np.dtype(source.image_dtype), (rows, *source.image_shape)), "mask": (np.dtype(bool), (rows,))}
    kinds["label"] = (batch["label"].dtype, (rows,))
    for key in names:
        dtype, shape = kinds[key]
        if batch[key].dtype != dtype or batch[key].shape != shape:
            wanted = f"{dtype}{list(shape)}, by the batch size, image_shape and image_dtype"
            if key == "label":
                wanted = f"int32{list(shape)}, the numbers of the classes; take the argmax of one-hot labels"
            given = f"{batch[key].dtype}{list(batch[key].shape)}"
            raise DataError(f"data set {name}: '{key}' of a batch is {given}; it must be {wanted}")
    check_labels(batch, source.num_classes, name)


def check_scale(batches: Iterator[Batch], source: Source, name: str) -> Iterator[Batch]:
    """Yields batches, of which the first is checked for images on another scale than the mean of the data set.

    Raises DataError for floating-point images from 0 to 1, or with negative pixels, beside a mean on the scale 0 to
    255: they would all be near one number. `name` is the name of the data set.
    """
    first = next(batches, None)
    if first is None:
        return
    images = first["image"] if isinstance(first, dict) and "image" in first else np.zeros(0)
    if source.mean is not None and max(source.mean) > 1 and np.issubdtype(images.dtype, np.floating) and images.size:
        low, high = float(images.min()), float(images.max())
        if low < 0 or high <= 1:
            raise DataError(
                f"data set {name}: the pixels of the first batch are from {low:.3g} to {high:.3g}, and mean and std "
                "are on the scale 0 to 255; give pixels from 0 to 255, or mean and std on the scale of the pixels"
            )
    yield first
    yield from batches


def endless(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    """Yields training batches; raises DataError when they end, because an epoch follows the other."""
    count = 0
    for batch in batches:
        yield batch
        count += 1
    raise DataError(f"data set {name} ended after {count} batches; train_batches must yield batches without end")
