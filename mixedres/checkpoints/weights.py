"""Weights of a network: the tensors of a file or a run, what is known about them, and the network that they make."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mixedres import models
from mixedres._internal.errors import MismatchError, WeightsError, listed
from mixedres._internal.types import Record, Variables
from mixedres.checkpoints import layouts
from mixedres.checkpoints.documents import Facts
from mixedres.data import PREPROCESSINGS, InputSpec, get_preprocessing

# Fields of `mixedres.models.Network` and their defaults here.
_FIELDS: Record = {"norm_policy": None, "precision": None, "keep_float32": ""}


@dataclasses.dataclass(frozen=True)
class WeightsFile(Facts):
    """Weights of a file, a folder or a run, and what is known about them.

        file = read_weights(pathlib.Path("resnet50.safetensors"))
        print(file.describe())  # resnet50 of 1000 classes, layout torchvision

    Attributes:
      path: the file, folder or workdir.
      tensors: tensors by their names in the file.
      layout: one of `mixedres.checkpoints.LAYOUTS`.
      batches: number of batches that the batch norms have seen in training; None if it is unknown.
      run: the flat config of the run that trained the weights; None if there is none.
      note: a line for a person about the reading of the weights, or ''.
    """

    path: pathlib.Path
    tensors: dict[str, np.ndarray]
    layout: str
    batches: int | None = None
    run: Record | None = None
    note: str = ""

    @functools.cached_property
    def architecture(self) -> layouts.Architecture | None:
        """Returns the architecture of the tensors; None if they are no whole ResNet."""
        return layouts.architecture(self.tensors, self.layout)

    @property
    def metadata(self) -> Record:
        """Returns the known facts, to be written with the tensors; a network of mixedres shows its name by itself."""
        names = [field.name for field in dataclasses.fields(Facts)]
        if self.network not in models.NETWORKS:
            names = [name for name in names if name not in ("network", "num_classes")]
        return {name: value for name in names if (value := getattr(self, name)) not in (None, {})}

    @property
    def name(self) -> str | None:
        """Returns the network's name, such as 'resnet50': as recorded, else by the tensors; None if it has none."""
        found = self.architecture
        return self.network or (models.name_of(found.bottleneck, found.stage_sizes) if found else None)

    @property
    def lacks_version(self) -> bool:
        """Returns whether the weights are of a ResNet of version 1 or 1.5, and do not tell which."""
        return not self.version and self.architecture is not None and self.architecture.bottleneck

    def describe(self) -> str:
        """Returns a description such as 'resnet50 of 1000 classes, layout torchvision'."""
        found = self.architecture
        if found is None and self.network is None:
            return f"no whole network, layout {self.layout}"
        num_classes = found.num_classes if found else self.num_classes
        head = f"of {num_classes} classes" if num_classes else "without a head"
        name = self.name
        if found and name is None:
            blocks = "bottleneck" if found.bottleneck else "basic"
            name = f"a ResNet of {blocks} blocks {', '.join(map(str, found.stage_sizes))}"
        return f"{name} {head}, layout {self.layout}"

    def network_keys(self) -> Record:
        """Returns the keys of the config that name the network; raises WeightsError if mixedres has no such network."""
        if self.name is None:
            todo = (
                f"mixedres has {', '.join(models.NAMES)}" if self.architecture else "name it with --config.model.name"
            )
            raise WeightsError(f"{self.path} is {self.describe()}; {todo}")
        found: Record = {"model.name": self.name, "model.version": self.version}
        found |= {f"model.{option}": value for option, value in self.options.items()}
        return found if self.epsilon is None else found | {"batch_norm.epsilon": self.epsilon}

    def create_network(self, policy: jmp.Policy, **options: Any) -> models.Network:
        """Returns the network of the weights.

        `options`: other fields of `mixedres.models.Network`, and epsilon for a ResNet.

        Raises WeightsError if mixedres has no such network.
        """
        found, name = self.architecture, self.name
        if name is None:
            raise WeightsError(f"{self.path} is {self.describe()}; mixedres has {', '.join(models.NAMES)}")
        if found and not found.num_classes:
            left = listed(layouts.beside(self.tensors, self.layout))
            if rest := left or self.note.partition("not of the network: ")[2]:
                raise WeightsError(
                    f"{self.path} has more than one dense layer at its end: {rest}; train a head with config.init_from"
                    + (", from a file without these tensors" if left else "")
                )
            raise WeightsError(f"{self.path} has no head; train one with config.init_from")
        num_classes = found.num_classes if found else self.num_classes
        try:
            if name in models.NETWORKS:
                fields = {field: options.get(field, value) for field, value in _FIELDS.items()}
                return models.NETWORKS[name](num_classes=num_classes, policy=policy, **fields)
            # Flax traces the initializers to check shapes; zeros are traced in a third of the time.
            zeros = jax.nn.initializers.zeros
            options |= {"version": self.version, "kernel_init": zeros, "head_init": zeros, **self.options}
            return models.create(name, num_classes=num_classes or 1, policy=policy, **options)
        except ValueError as error:
            raise WeightsError(f"{self.path}: {error}") from None

    def input_shape(self) -> tuple[int, int, int]:
        """Returns a (height, width, channels) that the network takes: for a ResNet, which takes every size, 64 x 64.

        Raises WeightsError if the shape is unknown.
        """
        if self.architecture is not None:
            return 64, 64, self.architecture.channels
        if self.input is None and self.network not in models.NETWORKS:
            return 64, 64, 3
        if self.input is None:
            raise WeightsError(f"{self.path} does not say what the network's input is")
        return InputSpec.from_json(self.input).shape

    @property
    def shapes(self) -> Variables:
        """Returns {'params', 'batch_stats'} of the network as shapes; raises WeightsError as `variables`."""
        model = self.create_network(jmp.Policy(jnp.float32, jnp.float32, jnp.float32))
        images = jax.ShapeDtypeStruct((1, *self.input_shape()), jnp.float32)
        # The key is made inside: outside, it would be two programs to compile.
        shapes: Variables = jax.eval_shape(lambda images: model.init(jax.random.key(0), images, train=False), images)
        return shapes

    def variables(self) -> Variables:
        """Returns {'params', 'batch_stats'} of the network, float32 numpy arrays.

        Raises WeightsError if mixedres has no such network.
        """
        try:
            return layouts.from_tensors(self.tensors, self.shapes, self.layout)[0]
        except ValueError as error:
            raise WeightsError(f"{self.path} looks like {self.describe()}, but: {error}") from None

    def variables_for(self, model: models.Network, like: Variables) -> tuple[Variables, bool]:
        """Returns the variables of a network that begins with these weights, and whether they have a head for it.

        Raises WeightsError if the weights are of another network; the message lists what does not fit.
        """
        if isinstance(model, models.ResNet):
            self._check_options(model)
        try:
            return layouts.from_tensors(self.tensors, like, self.layout)
        except MismatchError as error:
            raise WeightsError(
                f"{self.path} is {self.describe()}, not the network of this config: {error}; set "
                "--config.model.name=auto to take the network of the weights"
            ) from None

    def _check_options(self, model: models.ResNet) -> None:
        """Raises WeightsError if `model` has the shapes of the weights and computes something else."""
        found = self.architecture
        if found is None or found.stage_sizes != tuple(model.stage_sizes):
            return
        # Blocks of two convolutions are the same in versions 1 and 1.5.
        if found.bottleneck and self.version not in (None, model.version):
            raise WeightsError(
                f"{self.path} is of a ResNet of version {self.version}, which has weights of the same shapes; "
                f"set config.model.version={self.version}"
            )
        wanted = {name: self.options.get(name, values[0]) for name, values in models.OPTIONS.items()}
        if found.bottleneck:
            wanted.pop("projection")  # every head of a stage has one
        if model.small_images:
            wanted.pop("pool_padding")
        differing = [f"config.model.{name}={value}" for name, value in wanted.items() if getattr(model, name) != value]
        if differing:
            raise WeightsError(
                f"{self.path} is of a network with other padding or shortcuts; set {' and '.join(differing)}"
            )

    def notes(self, model: models.Network, spec: InputSpec | None = None) -> list[str]:
        """Returns notes on the weights in a network: on their reading, their version, and their images.

        `spec` is the network's input; None: nothing is said on images.
        """
        version = ""
        if isinstance(model, models.ResNet) and self.lacks_version:
            option = "--config.model.version of a run, --model_version of predict"
            version = f"the weights do not tell version 1 from 1.5; taking {model.version} ({option})"
        return [note for note in (self.note, version, *self._notes_on_images(spec)) if note]

    def _notes_on_images(self, spec: InputSpec | None) -> list[str]:
        """Returns notes if the weights were trained on images of another mean, deviation or size."""
        if self.input is None or spec is None:
            return []
        notes, (before, now) = [], (self.input["shape"][0], spec.shape[0])
        theirs, ours = ([given["mean"] or [], given["std"] or []] for given in (self.input, spec.to_json()))
        if not _alike(theirs, ours):
            fits = [name for name in PREPROCESSINGS if _alike(theirs, get_preprocessing(name).normalization(3))]
            advice = f"; set config.data.preprocessing={fits[0]}" if fits else ""
            notes.append(
                f"they are for images with other means or deviations than config.data.preprocessing gives here{advice}"
            )
        return notes + [f"trained on {before} pixels, and config.data.image_size gives {now}"] * (before != now)


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two pairs of means and deviations agree to the digits that libraries give."""
    return all(len(a) == len(b) and np.allclose(a, b, rtol=0.05, atol=1.0) for a, b in zip(one, other, strict=True))
