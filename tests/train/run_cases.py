"""Configs of runs that are short enough for a test."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from mixedres import checkpoints, models, train
from mixedres import config as base
from mixedres.checkpoints import Checkpoints
from mixedres.train.metrics.log import RunLog as RunLog
from tests.data import made
from tests.fuzz import mutations

# Keys that change neither the first state nor a step of a run with a constant rate.
FREE = {"steps", "eval_every", "checkpoint_every", "log_every", "log_resources_every", "profile", "stop_at_top1"}
FREE |= {"patience", "numerics.every", "keep_checkpoints", "init_from", "wandb"}
SHARED = {}


def build(config):
    """The parts of a run."""
    return train.plan(config).experiment


def fit(config, directory, *, clean=False, source=None, **options):
    """Trains in a directory; returns the summary."""
    return train.fit(train.plan(config, directory, clean=clean, source=source), **options)


def evaluate(config, directory, *, source=None, **options):
    """Evaluates the run in a directory; returns the result."""
    return train.evaluate(train.plan(config, directory, source=source, evaluates=True), **options)


def tiny(preset="fp16", **overrides):
    """A cifar_resnet8 on one synthetic batch of 16 small images: 6 steps with an evaluation after every second.

    The rate is constant, so that runs of any length share their compiled programs; so do all tests that take fp16.
    """
    config = base.defaults()
    config.steps = 6
    config.schedule.name = "constant"
    config.batch_size = 16
    config.num_devices = 2
    config.eval_every = "2 steps"
    config.checkpoint_every = "2 steps"
    config.log_every = 1
    config.max_consecutive_skips = 3
    config.log_resources_every = 0.0
    config.data.image_size = 8
    config.data.num_classes = 10
    config.data.train_examples = 64
    config.model.name = "cifar_resnet8"
    texts = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return base.finish(config, preset, texts)


def random_variables(name="cifar_resnet8", classes=10, version=None):
    """Variables of a network of colors in float32, with other numbers in every place; NumPy makes them."""
    model = models.create(name, num_classes=classes, policy=jmp.get_policy("float32"), version=version)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.random(x.shape, np.float32), shapes)


def shrink(patch, blocks=0):
    """Builds every network with 4 filters and with `blocks` blocks in one stage where it has one in each of three.

    A run of a cifar_resnet8 takes six seconds, most of which are compilation, and such a run two. Equal runs share
    their first state and their jitted steps, which are traced once.
    """
    create = models.create

    def smaller(name, **options):
        network = create(name, **options)
        return network.clone(stage_sizes=(network.stage_sizes[0] - 1 + blocks,), filters=4)

    patch.setattr(models, "create", smaller)
    for name in ("train_step", "eval_step"):
        patch.setattr(train.Experiment, name, _shared(getattr(train.Experiment, name)))
    patch.setattr(train.start, "new_state", _shared_state(train.start.new_state))


def without_training(patch):
    """Lets the steps of runs count and change no weight; for tests that need the files of a run alone."""

    def count(state, batch):
        metrics = dict.fromkeys(("loss", "top1", "grads_finite", "loss_scale"), jnp.float32(1))
        return dataclasses.replace(state, step=state.step + 1), metrics | {"halted": jnp.float32(0)}

    patch.setattr(train.Experiment, "train_step", lambda experiment: jax.jit(count))


def _key(experiment):
    """What two experiments have in common that differ in lengths and logs alone."""
    free = FREE if experiment.config.schedule.name == "constant" else FREE - {"steps"}
    config = {key: value for key, value in experiment.resolved.items() if key not in free}
    return repr((config, experiment.model, experiment.precision, experiment.data, experiment.has_ohwi_kernels()))


def _shared(make):
    """`make`, a function of an experiment alone, with one result for all equal experiments of the session."""

    def shared(experiment):
        key = make, _key(experiment)
        if key not in SHARED:
            SHARED[key] = make(experiment)
        return SHARED[key]

    return shared


def _shared_state(make):
    """`train.start.new_state` with one random state for all equal experiments."""
    random_state = _shared(make)

    def shared(experiment, initial=None):
        if initial is not None or jax.process_count() > 1:
            return make(experiment, initial)
        state = jax.tree.map(np.array, random_state(experiment))  # a step may write into the memory of its state
        return experiment.place_state(jax.device_put(state, experiment.replicated_sharding))

    return shared


def on_images(place, preset, **overrides):
    """A config for the images of three classes in ``place/images``, a few for training and 21 for evaluation."""
    options = {"name": "folder", "dir": place / "images", "image_size": 24, "num_classes": None, "train_examples": None}
    options = {"model__version": "1"} | {f"data__{key}": value for key, value in options.items()}
    return tiny(preset, **options | overrides)


def image_run(place):
    """Writes a directory with ``images/val`` and a run on them in ``run``."""
    made.write_folder(place / "images", count=24)
    made.write_folder(place / "images", count=21, part="val")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        without_training(patch)
        fit(on_images(place, "fp16"), place / "run")


def after(patch, owner, name, action, step=None):
    """Calls `action` after every call of a method of a log, or after the one of this step."""
    original = getattr(owner, name)

    def then(self, done, *rest):
        original(self, done, *rest)
        if step in (None, done):
            action()

    patch.setattr(owner, name, then)


def final_state(directory, config):
    """The state in the newest checkpoint of a run."""
    return train.start.restore_newest(build(config), Checkpoints(directory / checkpoints.workdir.CHECKPOINTS)).state


def lines(directory, *kinds):
    """The lines of metrics.jsonl, of these kinds or of all."""
    found = [json.loads(line) for line in (directory / checkpoints.workdir.METRICS).read_text().splitlines()]
    return [line for line in found if not kinds or line["kind"] in kinds]


def without_timings(found):
    """Lines of metrics without the numbers that no two runs have in common."""
    noisy = ("examples_per_second", "data_wait")
    return [{name: value for name, value in line.items() if name not in noisy} for line in found]


def events(path):
    """The events of a TensorBoard file, which is a TFRecord."""
    split, _ = mutations.PARTS["tfrecord"]
    return [event_pb2.Event.FromString(record) for record in split(path.read_bytes())]
