"""Predictions for image files, by an iterator whose memory does not grow with their number."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres._internal import environment
from mixedres._internal.mesh import AXIS, make_mesh
from mixedres.data import Prefetch
from mixedres.predict.classifier import Classifier


class Prediction(NamedTuple):
    """The prediction for a file: `top` has (class, probability) pairs, the most probable first.

    `error` says in one line why there are none; `square` is what the network saw.
    """

    path: str
    top: list[tuple[int, float]]
    square: np.ndarray | None = None
    error: str = ""


def predictions(chosen: Classifier, paths: Sequence[str], top: int, batch_size: int) -> Iterator[Prediction]:
    """The predictions for all files, in order; memory does not grow with their number.

    Args:
      chosen: the network; it runs on all devices of this process.
      paths: of the files.
      top: classes per image, at most all.
      batch_size: images at a time; the last batch is filled up with zeros.
    """
    # Not at the top: OpenCV takes a quarter of a second, and a mistake should not wait for it.
    from mixedres.data.images import crops, worker_processes

    devices = jax.local_devices()
    batch_size = -(-min(batch_size, len(paths)) // len(devices)) * len(devices)
    mesh = make_mesh(devices)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    run = jax.jit(chosen.probabilities, in_shardings=(whole, split), out_shardings=split)
    variables = jax.device_put(chosen.variables, whole)
    shape = jax.ShapeDtypeStruct((batch_size, *chosen.spec.shape), chosen.spec.image_dtype)
    compiled = run.lower(variables, shape).compile()
    environment.check_memory(compiled, devices, "a smaller --batch_size or --image_size")

    def put(batch: list[np.ndarray | str]) -> tuple[list[np.ndarray | str], jax.Array]:
        images = np.zeros((batch_size, *chosen.spec.shape), chosen.spec.image_dtype)
        for slot, found in enumerate(batch):
            if not isinstance(found, str):
                images[slot] = found
        return batch, jax.device_put(images, split)

    decoded = crops.center_crops(paths, chosen.spec, worker_processes.available_cpus())
    names = iter(paths)
    with Prefetch(_batched(decoded, batch_size), put) as ready:
        for batch, images in ready:
            probabilities = np.asarray(compiled(variables, images))
            for path, found, row in zip(itertools.islice(names, len(batch)), batch, probabilities, strict=False):
                if isinstance(found, str):
                    yield Prediction(path, [], error=found)
                    continue
                if not np.isfinite(row).all():
                    error = f"the network's output is not finite in {chosen.precision.name}; try --precision=fp32"
                    yield Prediction(path, [], error=error)
                    continue
                order = np.argsort(-row, kind="stable")[:top]
                yield Prediction(path, [(int(index), float(row[index])) for index in order], found)


def _batched(items: Iterable[np.ndarray | str], size: int) -> Iterator[list[np.ndarray | str]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
