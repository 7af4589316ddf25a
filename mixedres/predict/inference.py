"""Predictions for image files, in batches."""

import dataclasses
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres import models
from mixedres._internal import environment
from mixedres._internal.mesh import AXIS, make_mesh
from mixedres._internal.types import PyTree, Variables
from mixedres.data import Prefetch
from mixedres.predict.classifier import Classifier


class Prediction(NamedTuple):
    """Prediction for an image; `pandas.DataFrame(predictions)` is a table of them.

    Attributes:
      image: path of the file; for an array, its number in the call.
      name: the most probable class; '' if the image could not be classified.
      probability: that of `name`.
      error: reason in one line why the image could not be classified, or ''.
      top: pairs of class name and probability, the most probable first.
      labels: the outputs of the network that `top` names.
    """

    image: str
    name: str = ""
    probability: float = 0.0
    error: str = ""
    top: Sequence[tuple[str, float]] = ()
    labels: Sequence[int] = ()


class Output(Protocol):
    """What predict writes with --out=FILE; a function of `registry.OUTPUTS` makes it of the path of the file."""

    def begin(self, classifier: Classifier, source: str, paths: Sequence[str], topk: int) -> None:
        """Takes the network, what --from names, the paths of all images, and --topk."""

    def add(self, prediction: Prediction, square: np.ndarray | None) -> None:
        """Takes an image, whose prediction has all classes, and the network's input; None if there is an error."""

    def write(self) -> str:
        """Writes the file, and returns a line about it; raises OSError if it cannot be written."""


# Images of a batch for each device. On a CPU batches of 4 to 8 take the least time for an image: ResNet-50 in bfloat16
# takes 19 ms of a core for each of 8 images of 224 pixels, 25 ms for each of 64, and 35 ms for one.
_BATCH_SIZES = {"cpu": 8}
_BATCH_SIZE = 64


def default_batch_size() -> int:
    """Returns the number of images in a batch that suits the devices of this process."""
    devices = jax.local_devices()
    return len(devices) * _BATCH_SIZES.get(devices[0].platform, _BATCH_SIZE)


class Prepared(NamedTuple):
    """A compiled network; `prepare` makes one.

    Attributes:
      classifier: the network.
      batch_size: images at a time.
      compiled: (variables, images) -> probabilities.
      variables: the weights, on the devices.
    """

    classifier: Classifier
    batch_size: int
    compiled: jax.stages.Compiled
    variables: Variables


def prepare(classifier: Classifier, count: int, batch_size: int | None = None) -> Prepared:
    """Returns a network that is compiled for all devices of this process.

    `batch_size`: images at a time; None: `default_batch_size`, or fewer for fewer images.
    """
    devices = jax.local_devices()
    batch_size = -(-min(batch_size or default_batch_size(), count) // len(devices)) * len(devices)
    dtype = classifier.precision.policy.compute_dtype
    pixels = count * math.prod(classifier.spec.shape[:2])
    model = models.for_platform(classifier.model, devices[0].platform, dtype, pixels)
    compiled, variables = compile_network(dataclasses.replace(classifier, model=model), batch_size, devices)
    environment.check_memory(compiled, devices, "a smaller --batch_size or --image_size")
    return Prepared(classifier, batch_size, compiled, variables)


def predictions(
    prepared: Prepared, images: Sequence[str | np.ndarray], top: int
) -> Generator[tuple[Prediction, np.ndarray | None]]:
    """Yields the prediction for each image, in order, and the network's input; memory does not grow with the number of
    files. The input is None if the image could not be classified.

    `images`: paths of files, or arrays as `mixedres.data.center_crops` takes them. `top`: number of classes per image;
    more than the network has: all classes.
    """
    # Not at the top: importing OpenCV takes a quarter of a second, which a mistake in the command should not cost.
    from mixedres.data import available_cpus, center_crops

    classifier, batch_size, compiled, variables = prepared
    split = NamedSharding(make_mesh(jax.local_devices()), P(AXIS))

    def put(batch: list[np.ndarray | str]) -> tuple[list[np.ndarray | str], jax.Array]:
        whole = np.zeros((batch_size, *classifier.spec.shape), classifier.spec.image_dtype)
        for slot, square in enumerate(batch):
            if not isinstance(square, str):
                whole[slot] = square
        return batch, jax.device_put(whole, split)

    decoded = center_crops(images, classifier.spec, available_cpus())
    names = (image if isinstance(image, str) else str(index) for index, image in enumerate(images))
    with Prefetch(_batched(decoded, batch_size), put) as ready:
        for batch, on_devices in ready:
            probabilities = np.asarray(compiled(variables, on_devices))
            for image, square, row in zip(itertools.islice(names, len(batch)), batch, probabilities, strict=False):
                if isinstance(square, str):
                    yield Prediction(image, error=square), None
                    continue
                if not np.isfinite(row).all():
                    error = f"the network's output is not finite in {classifier.precision.name}; try --precision=fp32"
                    yield Prediction(image, error=error), None
                    continue
                labels = np.argsort(-row, kind="stable")[:top].tolist()
                found = [(classifier.class_names[label], float(row[label])) for label in labels]
                yield Prediction(image, *found[0], top=found, labels=labels), square


def compile_network(
    classifier: Classifier, batch_size: int, devices: Sequence[jax.Device]
) -> tuple[jax.stages.Compiled, Variables]:
    """Returns the compiled (variables, images) -> probabilities, and the variables on the devices."""
    lowered, variables, formats = lower_network(classifier, batch_size, devices)
    return lowered.compile(), jax.device_put(variables, formats)


def lower_network(
    classifier: Classifier, batch_size: int, devices: Sequence[jax.Device]
) -> tuple[jax.stages.Lowered, Variables, PyTree]:
    """Returns the lowered (variables, images) -> probabilities, the variables, and their placement and layout.

    The weights are cast once, here. On GPUs batch norms are folded into convolutions, and kernels have the memory
    layout of cuDNN. On CPUs a folded network takes as long.
    """
    platform, mesh = devices[0].platform, make_mesh(list(devices))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    classifier = classifier.for_inference(fold=platform == "gpu")
    formats = models.kernel_layout.formats(classifier.variables, whole) if platform == "gpu" else whole
    run = jax.jit(
        classifier.probabilities,
        in_shardings=(formats, split),
        out_shardings=split,
        compiler_options=models.compiler_options(classifier.model, platform),
    )
    shape = jax.ShapeDtypeStruct((batch_size, *classifier.spec.shape), classifier.spec.image_dtype)
    return run.lower(classifier.variables, shape), classifier.variables, formats


def _batched(items: Iterable[np.ndarray | str], size: int) -> Iterator[list[np.ndarray | str]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
