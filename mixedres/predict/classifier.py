"""A trained network as a function of images, for prediction and export."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mixedres import checkpoints, models, precision
from mixedres._internal.cli import command_line
from mixedres._internal.errors import ConfigError, config_errors
from mixedres._internal.files import parse_json, read_regular
from mixedres._internal.mesh import check_devices
from mixedres._internal.names import LONGEST_NAME, MOST_SIDE
from mixedres._internal.types import Variables
from mixedres.checkpoints import WeightsFile
from mixedres.config import precision_of, unflatten
from mixedres.data import InputSpec, get_preprocessing

# Largest file of class names, in bytes.
_MOST_LABELS = 2**24


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A trained network as a function of images.

    Attributes:
      name: name of the network, such as 'resnet50'.
      model: the network, in the dtypes of `precision`.
      precision: the precision of the arithmetic.
      spec: the network's input.
      class_names: names of the classes by output; a class without a name has its number.
      variables: {'params', 'batch_stats'}, numpy arrays, float32 unless `for_inference` made them.
      notes: lines for the person who starts a command.
    """

    name: str
    model: models.Network
    precision: precision.Precision
    spec: InputSpec
    class_names: tuple[str, ...]
    variables: Variables
    notes: tuple[str, ...] = ()

    def for_inference(self, *, fold: bool) -> "Classifier":
        """Returns the classifier with the weights in the dtypes of its arithmetic.

        `fold`: fold batch norms into convolutions, if the network allows it and its layers cast.
        """
        fold = fold and self.precision.implementation == "casting"
        model, variables = models.for_inference(self.model, self.variables, fold=fold)
        return dataclasses.replace(self, model=model, variables=variables)

    def check_takes_files(self, source: str) -> None:
        """Raises ConfigError if no image file can become an input of the network, which was read from `source`."""
        if not self.spec.fits_files:
            raise ConfigError(f"{source} takes images of shape {self.spec.shape}, which no image file can become")

    def probabilities(self, variables: Variables, images: jax.Array) -> jax.Array:
        """Returns the probabilities of the classes, (b, classes) float32; `images` are (b, *spec.shape). Traceable."""
        normalize = models.normalization(self.spec.mean, self.spec.std)
        logits = self.precision.rewrite(self.model.apply)(variables, normalize(images), train=False)
        return jax.nn.softmax(logits.astype(jnp.float32))


def read_classifier(options: argparse.Namespace) -> Classifier:
    """Reads the network that the options of `mixedres.predict.add_arguments` name, as a `Classifier`.

    Raises ConfigError as for `open_classifier`, if the file of --labels cannot be read, and if no image file can become
    an input of the network.
    """
    names = _class_names(options.labels) if options.labels else None
    with config_errors("--from"):
        classifier = open_classifier(
            command_line.path(options.source),
            preset=options.precision,
            class_names=names,
            image_size=options.image_size,
            preprocessing=options.preprocessing,
            version=options.model_version,
        )
    classifier.check_takes_files(options.source)
    return classifier


def open_classifier(
    path: pathlib.Path,
    *,
    preset: str | None = None,
    class_names: Sequence[str] | None = None,
    image_size: int | None = None,
    preprocessing: str | None = None,
    version: str | None = None,
) -> Classifier:
    """Reads the network of a run or of a file of weights.

    `preset`: name of the precision; None: the run's, and fp32 for weights. `class_names`: names of all classes; None:
    as recorded. `image_size`: height and width of the network's input; None: as recorded. `preprocessing`: how images
    become squares; None: as recorded. `version`: '1' or '1.5', of a ResNet whose weights do not tell it; None: 1.5.

    Raises WeightsError if there is no such network; ConfigError if an argument is invalid, or if the class names do not
    fit the number of classes.
    """
    check_devices()
    file = checkpoints.read_weights(path)
    if version is not None:
        if version not in ("1", "1.5") or not file.lacks_version:
            only = "for weights that do not tell 1 from 1.5"
            raise ConfigError(f"version {version!r} is {only}; leave it out for {path}")
        file = dataclasses.replace(file, version=version)
    variables, name = file.variables(), file.name
    assert name is not None  # without a name, there would be no variables
    try:
        chosen = precision.get(preset or "fp32")
        if preset is None and file.run is not None:
            chosen, _ = precision_of(unflatten(file.run))
        epsilon = 1e-5 if file.epsilon is None else file.epsilon
        model = file.create_network(epsilon=epsilon, **chosen.network_options)
        spec, notes = _spec(file, name, file.input_shape()[2], image_size, preprocessing)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    names = tuple(class_names or file.class_names or ())
    if len(names) > model.num_classes or (class_names and len(names) < model.num_classes):
        raise ConfigError(
            f"{len(names)} class names for a network of {model.num_classes} classes; name their file with --labels=FILE"
        )
    if too_long := next((name for name in names if len(name) > LONGEST_NAME), None):
        raise ConfigError(
            f"a class name has {len(too_long):,} characters, {too_long[:50]!r} ...; at most {LONGEST_NAME}"
        )
    names = (*names, *(str(index) for index in range(len(names), model.num_classes)))
    notes = (*notes, *file.notes(model))
    return Classifier(name, model, chosen, spec, names, variables, notes)


def _spec(
    file: WeightsFile, name: str, channels: int, image_size: int | None, family: str | None
) -> tuple[InputSpec, tuple[str, ...]]:
    """Returns the network's input, and notes on it; raises ValueError if the input is not an image.

    `family` is the preprocessing.
    """
    run = file.run or {}
    notes: tuple[str, ...] = ()
    if image_size is not None and not 1 <= image_size <= MOST_SIDE:
        raise ValueError(f"--image_size={image_size} must be from 1 to {MOST_SIDE}")
    known = InputSpec.from_json(file.input) if file.input else None
    if known and known.shape[2] != channels:
        raise ValueError(f"{file.path} has {channels} input channels, and says that its images have {known.shape[2]}")
    usual = known.shape[0] if known else run.get("data.image_size") or (32 if name.startswith("cifar_") else 224)
    size = image_size or usual
    if family or not (known or name.startswith("cifar_")):
        spec = get_preprocessing(family or run.get("data.preprocessing") or "torch").input_spec(size, channels)
    elif known and not image_size:
        spec = known
    else:
        spec = dataclasses.replace(known or InputSpec((size, size, channels)), shape=(size, size, channels))
    if not known and not (image_size and family):
        how = "every image standardized by itself" if spec.mean is None else f"--preprocessing={family or 'torch'}"
        notes = (f"{file.path} does not say what its input is; taking --image_size={size}, {how}",)
    return spec, notes


def _class_names(file: str) -> tuple[str, ...]:
    path = command_line.path(file)
    try:
        text = read_regular(path, _MOST_LABELS).decode()
        if path.suffix == ".json":
            names = parse_json(text)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("it must be a JSON list of texts")
            return tuple(names)
    except OSError as error:
        raise ConfigError(f"--labels={file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"--labels={file}: {error}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())
