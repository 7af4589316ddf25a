"""The steps of Flax's ImageNet example, from a checkout of its repository: its model, its loss, its TrainState.

The example is read where it lies and not changed. Its training script imports TensorFlow, its data sets and CLU; the
steps use none of them, so that empty modules take their place.

Its 3x3 convolutions of stride 2 and its pool pad with 'SAME', which for even sizes is not what ours and PyTorch do:
from equal weights the losses are close, and not equal. On the CPU it trains in float16 without a loss scale.
"""

import importlib
import importlib.machinery
import pathlib
import re
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.lib import runs
from experiments.timing.task import MOMENTUM, WEIGHT_DECAY, Contender, MissingError, Task
from mixedres._internal.tree import named_leaves
from mixedres.data.images.worker_processes import available_cpus

DTYPES = ("fp32", "tf32", "fp16")
_UNUSED = ("clu", "clu.metric_writers", "clu.periodic_actions", "tensorflow", "tensorflow_datasets", "input_pipeline")
# Layers of a block: (our name, theirs).
_LAYERS = {f"conv{i + 1}": f"Conv_{i}" for i in range(3)} | {f"norm{i + 1}": f"BatchNorm_{i}" for i in range(3)}


class FlaxExample(Contender):
    """What the passes share: the state with the task's weights and the batch, on one device."""

    _step: Any

    def __init__(self, task: Task, dtype: str, checkout: pathlib.Path):
        if dtype not in DTYPES:
            raise MissingError(f"trains in {' and '.join(DTYPES)}, not in {dtype}")
        super().__init__("Flax example", dtype)
        self._train, models = load(checkout)
        self._train.NUM_CLASSES = task.num_classes
        half = dtype == "fp16"
        model = self._train.create_model(model_cls=_network(task.model, models), half_precision=half)
        self._rate = lambda step: task.learning_rate
        config = ConfigDict({"momentum": MOMENTUM, "half_precision": half})
        state = self._train.create_train_state(jax.random.key(0), config, model, task.images.shape[1], self._rate)
        state = state.replace(**weights(task, state.params, state.batch_stats))
        self._state = flax.jax_utils.replicate(state, jax.devices()[:1])
        images = task.normalized.astype(np.float16 if half else np.float32)
        batch = {"image": images[None], "label": task.labels[None]}
        self._batch = jax.device_put(batch, jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def _compiled(self, step: Callable) -> Any:
        """A step of theirs under pmap, as they call it."""
        # What JAX calls float32 is TF32 on recent GPUs; fp32 is the true one, as in our preset.
        with jax.default_matmul_precision("highest" if self.dtype == "fp32" else "default"):
            mapped = jax.pmap(step, "batch", devices=jax.devices()[:1])
            return mapped.lower(self._state, self._batch).compile()

    def threads(self) -> int:
        """As in our own step."""
        return available_cpus()

    def peak_bytes(self) -> int:
        """Arguments, results and temporary memory of the compiled step, which donates nothing."""
        return runs.program_bytes(self._step)


class Training(FlaxExample):
    """Its `train_step`."""

    def __init__(self, task: Task, dtype: str, checkout: pathlib.Path):
        super().__init__(task, dtype, checkout)
        self._step = self._compiled(partial(self._train.train_step, learning_rate_fn=self._rate))

    def take(self, steps: int) -> float:
        """See `Contender.take`; the loss is the cross entropy without its L2 term, as ours is."""
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"][0])


class Evaluation(FlaxExample):
    """Its `eval_step`: loss and top-1."""

    def __init__(self, task: Task, dtype: str, checkout: pathlib.Path):
        super().__init__(task, dtype, checkout)
        self._step = self._compiled(self._train.eval_step)

    def take(self, steps: int) -> float:
        """See `Contender.take`."""
        for _ in range(steps):
            metrics = self._step(self._state, self._batch)
        jax.block_until_ready(metrics)
        return float(metrics["loss"][0])


def no_prediction(task: Task, dtype: str, checkout: pathlib.Path) -> Training:
    """Raises MissingError: the example trains and evaluates."""
    raise MissingError("has no prediction")


PASSES = {"training": Training, "evaluation": Evaluation, "prediction": no_prediction}


def load(checkout: pathlib.Path) -> tuple[ModuleType, ModuleType]:
    """The example's modules ``train`` and ``models``, from flax's repository or ``examples/imagenet`` of it.

    Raises MissingError if they are not there.
    """
    found = [path for path in (checkout, checkout / "examples" / "imagenet") if (path / "train.py").is_file()]
    if not found or not (found[0] / "models.py").is_file():
        raise MissingError("--flax names no directory with examples/imagenet/train.py and models.py")
    # It looks for TensorFlow by itself, which must come before the stand-ins.
    importlib.import_module("flax.training.checkpoints")
    with (
        mock.patch.object(sys, "path", [str(found[0]), *sys.path]),
        mock.patch.dict(sys.modules, {name: _empty(name) for name in _UNUSED}),
    ):
        modules = importlib.import_module("train"), importlib.import_module("models")
    assert WEIGHT_DECAY == 1e-4  # the example's own constant
    return modules


def _empty(name: str) -> mock.MagicMock:
    """A module with every attribute; other packages look for the spec of TensorFlow's."""
    return mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))


def _network(model: str, models: ModuleType) -> Any:
    """Their class for our name; CIFAR's networks, which they have not, are made of their blocks."""
    cifar = re.fullmatch(r"cifar_resnet(\d+)", model)
    if cifar:
        return partial(_Cifar, blocks=(int(cifar[1]) - 2) // 6, block=models.ResNetBlock)
    name = model.replace("resnet", "ResNet")
    if not hasattr(models, name):
        raise MissingError(f"has no {model}")
    return getattr(models, name)


class _Cifar(nn.Module):
    """Three stages of the example's basic blocks with 16, 32 and 64 filters behind a 3x3 stem."""

    blocks: int
    block: Any
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype, axis_name="batch"
        )
        x = nn.relu(norm(name="bn_init")(conv(16, (3, 3), name="conv_init")(x)))
        for stage in range(3):
            for index in range(self.blocks):
                strides = (2, 2) if stage and not index else (1, 1)
                block = self.block(16 * 2**stage, strides=strides, conv=conv, norm=norm, act=nn.relu)
                x = block(x)
        return jnp.asarray(nn.Dense(self.num_classes, dtype=self.dtype)(jnp.mean(x, (1, 2))), self.dtype)


def weights(task: Task, params: Any, batch_stats: Any) -> dict[str, Any]:
    """Our weights under their names; raises ValueError where a shape differs."""
    ours = named_leaves({"params": task.params, "batch_stats": task.batch_stats})
    blocks = sorted({name.split("/")[1] for name in ours if "/block_layer" in name}, key=_block_order)
    kind = next(name.rsplit("_", 1)[0] for name in params if "Block_" in name)
    renamed = {"stem_conv": "conv_init", "stem_norm": "bn_init", "head": "Dense_0"}
    renamed |= {block: f"{kind}_{index}" for index, block in enumerate(blocks)}
    found = {
        "/".join(_LAYERS.get(part, renamed.get(part, part)) for part in name.split("/")): value
        for name, value in ours.items()
    }
    like = {"params": params, "batch_stats": batch_stats}
    theirs = named_leaves(like)
    if {k: v.shape for k, v in theirs.items()} != {k: v.shape for k, v in found.items()}:
        raise ValueError(f"the weights do not fit: {sorted(theirs.keys() ^ found.keys())[:4]}")
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(found[name]) for name in theirs])


def _block_order(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def versions(checkout: pathlib.Path | None) -> dict[str, str]:
    """{'flax_example': commit} of the checkout; empty where there is none."""
    if checkout is None:
        return {}
    found = runs.commit(checkout)
    return {"flax_example": found} if found else {}
