"""Checks of what a source promises: its attributes, and every batch, before a compiled step gets it."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mixedres._internal.errors import DataError
from mixedres.data.input_spec import InputSpec
from mixedres.data.sources import Batch, Source

# Types of pixels; np.uint8, which NumPy takes for its dtype, is equal to it.
_PIXELS = (np.dtype(np.uint8), np.dtype(np.float32))


def check_labels(batch: Batch, num_classes: int, name: str) -> None:
    """Checks the labels of a batch, because XLA checks no index: a label of -1 trains the last class.

    Raises DataError for a label that is no integer or not in [0, num_classes), unless the mask leaves out its row.
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
    shape, mean, std, names = source.image_shape, source.mean, source.std, source.class_names
    is_text = isinstance(source.fingerprint, str) and source.fingerprint
    for is_right, attribute, must_be in (
        (is_text, "fingerprint", "a text that changes with the data"),
        (_makes_spec(shape), "image_shape", "(height, width, channels)"),
        ((mean is None) == (std is None), "mean", "given with std, or not at all"),
        (_makes_spec(shape, mean, std), "mean", "one number per channel, beside a std of one above 0 per channel"),
        (source.image_dtype in _PIXELS, "image_dtype", "np.dtype('uint8') or np.dtype('float32')"),
        (isinstance(names, tuple | list), "class_names", "a tuple of names, or ()"),
        (isinstance(source.note, str), "note", "a text, perhaps ''"),
        (isinstance(source.unreadable, dict), "unreadable", "a dictionary, {} at first"),
    ):
        if not is_right:
            raise ValueError(f"{attribute} is {getattr(source, attribute)!r:.200}; it must be {must_be}")
    if not isinstance(getattr(source, "input_spec", None), InputSpec):
        raise ValueError("it has no input_spec; derive the class from mixedres.data.DataInfo")


def _makes_spec(*arguments: Any) -> bool:
    with contextlib.suppress(ValueError):
        return bool(InputSpec(*arguments))
    return False


def check_batch(batch: Batch, source: Source, name: str, rows: int, *, has_mask: bool) -> None:
    """Checks a batch of `rows` examples, before a compiled step gets it; `has_mask` is for batches of an evaluation.

    Raises DataError for other arrays than `Source` asks for, other shapes or dtypes, and labels out of range.
    """
    names = ("image", "label", "mask") if has_mask else ("image", "label")
    if not isinstance(batch, dict) or set(names) != batch.keys():
        given = ", ".join(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise DataError(f"data set {name}: a batch is {given}; it must be a dictionary with {', '.join(names)} alone")
    kinds = {"image": (np.dtype(source.image_dtype), (rows, *source.image_shape)), "mask": (np.dtype(bool), (rows,))}
    for key in names:
        array = batch[key]
        if not isinstance(array, np.ndarray | _jax_array()) or isinstance(array, np.ma.MaskedArray):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise DataError(f"data set {name}: '{key}' of a batch is a {kind}; it must be an array of NumPy or JAX")
        dtype, shape = kinds.get(key, (array.dtype, (rows,)))
        if array.dtype != dtype or array.shape != shape:
            wanted = f"{dtype}{list(shape)}, by the batch size, image_shape and image_dtype"
            if key == "label":
                wanted = f"int32{list(shape)}, the numbers of the classes; take the argmax of one-hot labels"
            given = f"{array.dtype}{list(array.shape)}"
            raise DataError(f"data set {name}: '{key}' of a batch is {given}; it must be {wanted}")
    check_labels(batch, source.num_classes, name)


def _jax_array() -> type:
    """Returns the class of JAX's arrays; a class of nothing before JAX is imported."""
    jax = sys.modules.get("jax")
    return jax.Array if jax is not None else type(None)


def check_scale(batches: Iterable[Batch], source: Source, name: str) -> Iterator[Batch]:
    """Yields batches, of which the first is checked for images on another scale than the mean of the data set.

    Raises DataError for what is no iterator, and for floating-point images from 0 to 1, or with negative pixels, beside
    a mean on the scale 0 to 255: they would all be near one number.
    """
    if not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise DataError(f"data set {name}: its batches are {kind}; train_batches and eval_batches must yield batches")
    batches = iter(batches)
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
