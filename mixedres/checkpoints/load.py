"""Trained weights from a run, a file, a folder that transformers saved, or a checkpoint of TensorFlow."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mixedres import models
from mixedres._internal.errors import WeightsError, reason
from mixedres._internal.files import split_checkpoint
from mixedres._internal.types import Record, Variables
from mixedres.checkpoints import layouts, workdir
from mixedres.checkpoints.documents import read_record
from mixedres.checkpoints.manager import Checkpoints
from mixedres.checkpoints.weights import WeightsFile, checked, read_weights_file
from mixedres.data import InputSpec

# Fields of `mixedres.models.Network` and their defaults here.
_FIELDS: Record = {"norm_policy": None, "precision": None, "keep_float32": ""}


def read_weights(path: pathlib.Path) -> WeightsFile:
    """Reads the weights of a run, of a file, of a folder that transformers saved, or of a checkpoint of TensorFlow.

    For a run, reads the newest undamaged checkpoint, or the one that the path names (runs/x@best, runs/x@600), and the
    moving average of the weights if there is one.

    Raises:
      WeightsError: if there are no weights, or they cannot be read.
    """
    try:
        directory, name = split_checkpoint(path)
        if (directory / workdir.CHECKPOINTS).is_dir() and workdir.RecordedRun(directory).holds_config():
            return _read_run(directory, name)
        if name is not None:
            raise WeightsError(f"{directory} holds no run, so it has no checkpoint {name}")
        return read_weights_file(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({reason(error)})") from None


def _read_run(directory: pathlib.Path, name: str | None) -> WeightsFile:
    recorded = workdir.RecordedRun(directory)
    only = None if name is None else recorded.step_named(name)
    if not recorded.steps():
        raise WeightsError(f"{directory} has no checkpoint yet; train first")
    try:
        arrays, record, damaged = Checkpoints(directory / workdir.CHECKPOINTS).restore_newest(None, only)
    except OSError as error:
        raise WeightsError(str(error)) from None
    where = f"the {'newest checkpoint' if only is None else f'checkpoint of step {only}'} in {directory}"
    config, data = read_record(record, where)["config"], recorded.data() or {}
    names = tuple(data.get("class_names", ()))
    options = {name: config[f"model.{name}"] for name in models.OPTIONS}
    try:
        spec = None if data.get("input") is None else InputSpec.from_json(data["input"]).to_json()
    except ValueError as error:
        raise WeightsError(f"{directory / workdir.DATA}: {error}") from None
    tensors, step = _tensors_and_step(arrays, where)
    return WeightsFile(
        directory,
        checked(directory, tensors),
        "mixedres",
        batches=step,
        network=config["model.name"],
        num_classes=data.get("num_classes", len(names)),
        version=config["model.version"] or models.default_version(config["model.name"]),
        options={name: value for name, value in options.items() if value != models.OPTIONS[name][0]},
        class_names=names or None,
        epsilon=config["batch_norm.epsilon"],
        input=spec,
        run=workdir.portable(config),
        note=f"no checkpoint of step {', '.join(map(str, damaged))} is whole; taking step {step}" if damaged else "",
    )


def _tensors_and_step(arrays: Mapping[str, np.ndarray], where: str) -> tuple[dict[str, np.ndarray], int]:
    """Returns the weights in a checkpoint, averaged if the run had a moving average, and the number of steps.

    Raises:
      WeightsError: if the arrays are not those of a training state.
    """
    averages = {name.removeprefix("ema/"): array for name, array in arrays.items() if name.startswith("ema/")}
    tensors = averages or {name: x for name, x in arrays.items() if name.startswith(("params/", "batch_stats/"))}
    step = arrays.get("step")
    if not tensors or step is None or step.shape or step.dtype != np.int32 or step < 0:
        raise WeightsError(f"{where} holds no state of a training run; put back a copy")
    return tensors, int(step)


def network_name(file: WeightsFile) -> str | None:
    """Returns the network's name, such as 'resnet50': the name that the run recorded, else by the tensors; or None."""
    resnet = file.architecture
    return file.network or (models.name_of(resnet.bottleneck, resnet.stage_sizes) if resnet else None)


def network_keys(path: pathlib.Path) -> Record:
    """Returns the keys of the config that name the network of a run or of a file of weights, and perhaps more keys.

    Raises:
      WeightsError: if mixedres has no such network.
    """
    if recorded := workdir.RecordedRun(split_checkpoint(path)[0]).config():
        return recorded
    file = read_weights(path)
    name = network_name(file)
    if name is None:
        todo = f"mixedres has {', '.join(models.NAMES)}" if file.architecture else "name it with --config.model.name"
        raise WeightsError(f"{path} is {describe_weights(file)}; {todo}")
    found: Record = {"model.name": name, "model.version": file.version}
    found |= {f"model.{option}": value for option, value in file.options.items()}
    return found if file.epsilon is None else found | {"batch_norm.epsilon": file.epsilon}


def create_network(file: WeightsFile, policy: jmp.Policy, **options: Any) -> models.Network:
    """Returns the network of a file.

    Args:
      file: the weights.
      policy: dtypes of parameters, arithmetic and logits.
      **options: other fields of `mixedres.models.Network`, and epsilon for a ResNet.

    Raises:
      WeightsError: if mixedres has no such network.
    """
    resnet, known = file.architecture, network_name(file)
    if known is None:
        raise WeightsError(f"{file.path} is {describe_weights(file)}; mixedres has {', '.join(models.NAMES)}")
    if resnet and not resnet.num_classes:
        raise WeightsError(f"{file.path} has no head; train one with config.init_from")
    num_classes = resnet.num_classes if resnet else file.num_classes
    try:
        if known in models.NETWORKS:
            fields = {name: options.get(name, value) for name, value in _FIELDS.items()}
            return models.NETWORKS[known](num_classes=num_classes, policy=policy, **fields)
        # Flax traces the initializers to check shapes; zeros are traced in a third of the time.
        zeros = jax.nn.initializers.zeros
        options |= {"version": file.version, "kernel_init": zeros, "head_init": zeros, **file.options}
        return models.create(known, num_classes=num_classes or 1, policy=policy, **options)
    except ValueError as error:
        raise WeightsError(f"{file.path}: {error}") from None


def input_shape(file: WeightsFile) -> tuple[int, int, int]:
    """Returns a (height, width, channels) that the network takes: for a ResNet, which takes every size, 64 x 64.

    Raises:
      WeightsError: if the shape is unknown.
    """
    if file.architecture is not None:
        return 64, 64, file.architecture.channels
    if file.input is None:
        raise WeightsError(f"{file.path} does not say what the network's input is")
    return InputSpec.from_json(file.input).shape


def variables(file: WeightsFile) -> Variables:
    """Returns {'params', 'batch_stats'} of the network, float32 numpy arrays.

    Raises:
      WeightsError: if mixedres has no such network.
    """
    model = create_network(file, jmp.Policy(jnp.float32, jnp.float32, jnp.float32))
    images = jax.ShapeDtypeStruct((1, *input_shape(file)), jnp.float32)
    # The key is made inside: outside, it would be two programs to compile.
    like = jax.eval_shape(lambda images: model.init(jax.random.key(0), images), images)
    try:
        return layouts.from_tensors(file.tensors, like, file.layout)[0]
    except ValueError as error:
        raise WeightsError(f"{file.path} looks like {describe_weights(file)}, but: {error}") from None


def describe_weights(file: WeightsFile) -> str:
    """Returns a description such as 'resnet50 of 1000 classes, layout torchvision'."""
    resnet = file.architecture
    if resnet is None and file.network is None:
        return f"no whole network, layout {file.layout}"
    num_classes = resnet.num_classes if resnet else file.num_classes
    head = f"of {num_classes} classes" if num_classes else "without a head"
    name = network_name(file)
    if resnet and name is None:
        blocks = "bottleneck" if resnet.bottleneck else "basic"
        name = f"a ResNet of {blocks} blocks {', '.join(map(str, resnet.stage_sizes))}"
    return f"{name} {head}, layout {file.layout}"


def lacks_version(file: WeightsFile) -> bool:
    """Returns whether weights are of a ResNet of version 1 or 1.5, and do not tell which."""
    return not file.version and file.architecture is not None and file.architecture.bottleneck


def note_of_version(file: WeightsFile, model: models.Network) -> str:
    """Returns a note about the version that a network was given, if its weights do not tell version 1 from 1.5."""
    if not isinstance(model, models.ResNet) or not lacks_version(file):
        return ""
    option = "--config.model.version of a run, --model_version of predict"
    return f"the weights do not tell version 1 from 1.5; taking {model.version} ({option})"
