"""TensorFlow's official ResNets beside the recipes that are to be equal to them: same weights, same batches, float32.

Needs tensorflow, tf_keras and tf-models-official 2.2.0 (without what that depends on), the original's own code of the
custom loop; r1 is written out in `tests.original.r1`. The limits are those of rounding: a random network on small
images multiplies a rounding of 6e-8 by 1,000 up to its logits, and in a gradient a ReLU flips where its input is near
0.
"""

import fcntl
import functools
import importlib.util
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from mixedres import checkpoints, main, train
from mixedres.models import normalization
from tests import ROOT, run_command
from tests.config.test_config import resolve
from tests.original import cases
from tests.train.run_cases import build

MISSING = [name for name in ("tensorflow", "tf_keras", "official") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}")]
# Runs of one process share the seconds that TensorFlow takes to start.
GROUPS = [["loop64"], ["r1_64", "r1_v2", "r1_18"], ["cifar_v1", "cifar_v2"]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs the original for a case, once for all processes of the tests, and returns the folder of its results."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    return functools.partial(results, shared)


def results(shared, name):
    group = next(group for group in GROUPS if name in group)
    folder = shared / f"original-{group[0]}"
    with open(shared / f"{group[0]}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = shared / f"partial-{group[0]}"
            partial.mkdir()
            command = [sys.executable, "-m", "tests.original.run_tensorflow", str(partial), *group]
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr[-3000:]
            partial.rename(folder)
    return folder / name


def newest(folder):
    """The prefix of the checkpoint in a folder that was moved; its file 'checkpoint' has the path of before."""
    (index,) = (folder / "checkpoint").glob("*.index")
    return index.with_suffix("")


def experiment_of(case, checkpoint):
    """The experiment of a recipe on the case's batch, and its state with the weights of the original's checkpoint."""
    config = resolve(case.recipe, "fp32")
    config.init_from = str(checkpoint)
    config.batch_size, config.num_devices, config.steps = case.batch, 1, 100
    config.data.name, config.data.image_size, config.data.train_examples = "synthetic", case.side, case.examples
    config.optimizer.learning_rate = case.base
    config.schedule.warmup, config.schedule.boundaries = case.warmup_epochs, case.boundaries
    config.schedule.factors = case.factors
    if case.is_loop:
        pass
    elif case.cifar:
        config.model.name, config.model.version = f"cifar_resnet{case.size}", str(case.version)
    else:
        config.model.name, config.model.version = f"resnet{case.size}", "1.5" if case.version == 1 else "2"
    experiment = build(config)
    initial = train.start.load_weights(str(checkpoint), experiment.variable_shapes(), experiment.model)
    return experiment, train.start.new_state(experiment, initial), initial


def apart(ours, theirs):
    """||ours - theirs|| / ||theirs|| over all arrays."""
    difference = sum(float(np.sum(np.square(np.float64(ours[name]) - np.float64(theirs[name])))) for name in theirs)
    return (difference / sum(float(np.sum(np.square(np.float64(value)))) for value in theirs.values())) ** 0.5


def variables_of(file, prefix):
    """{path in our layout: array} of the entries of a result that begin with `prefix`."""
    from mixedres.original import names as tensorflow_names

    named = {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}
    return tensorflow_names.find_network(named)[0]


def flat(variables):
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def quickly(jitted, *args):
    """Compiles with less optimization: the program runs twice."""
    return jitted.lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", cases.ALL)
def test_logits_in_evaluation(name, found):
    """From the checkpoint and from the SavedModel."""
    case, folder = cases.ALL[name], found(name)
    experiment, state, initial = experiment_of(case, newest(folder))
    saved = train.start.load_weights(str(folder / "saved_model"), experiment.variable_shapes(), experiment.model)
    jax.tree.map(np.testing.assert_array_equal, saved.variables, initial.variables)
    apply = jax.jit(lambda variables, images: experiment.model.apply(variables, images, train=False))
    logits = quickly(apply, state.variables, case.images)(state.variables, case.images)
    limit = 1e-5 if case.cifar else 2e-4
    assert apart({"logits": logits}, {"logits": np.load(folder / "evaluated.npy")}) < limit


# Of gradients of ResNet-50 nothing can be said: TensorFlow is 2e-2 from float64, and so are we; and so is their way.
IMAGENET = {"logits": 2e-4, "statistics": 1e-5, "way of the weights": 0.1}
CIFAR = {"logits": 1e-5, "statistics": 1e-5, "gradients": 2e-2, "way of the weights": 5e-2}
LIMITS = {
    "loop64": IMAGENET | {"weights": 2e-4},
    "r1_64": IMAGENET | {"weights": 2e-3},
    "cifar_v1": CIFAR | {"weights": 3e-4},
    "cifar_v2": CIFAR | {"weights": 1e-4},
}


@pytest.mark.parametrize("name", LIMITS)
def test_two_steps_equal_the_original(name, found):
    """Logits in training, gradients with L2, statistics, rates and weights."""
    case, folder, limits = cases.ALL[name], found(name), LIMITS[name]
    experiment, state, _ = experiment_of(case, newest(folder))
    theirs = np.load(folder / "found.npz")
    batch = {"image": case.images, "label": case.labels}
    measured = {}

    logits = _training_logits(experiment, state, batch)
    if case.is_loop:  # it has its softmax inside
        ours, key = np.asarray(jax.nn.softmax(logits)), "probabilities"
    else:
        ours, key = logits, "logits"
    measured["logits"] = apart({"": ours}, {"": theirs[f"0/{key}"]})
    if case.cifar:
        measured["gradients"] = apart(*_gradients(experiment, state, batch, theirs))

    train_step, before = quickly(experiment.train_step(), state, batch), flat(state.variables)
    for index in range(case.steps):
        rate = float(experiment.learning_rate(index))
        np.testing.assert_allclose(rate, theirs[f"{index}/rate"], rtol=1e-6, atol=1e-12)
        state, metrics = train_step(state, batch)
        of, after = flat(state.variables), variables_of(theirs, f"{index}/after:")
        if index == 0:
            statistics = {path: value for path, value in after.items() if path.startswith("batch_stats")}
            measured["statistics"] = apart(of, statistics)
            cross_entropy = float(theirs["0/loss"]) - _l2(experiment, before)
            np.testing.assert_allclose(float(metrics["loss"]), cross_entropy, rtol=1e-4)
    params = {path: value for path, value in after.items() if path.startswith("params")}
    measured["weights"] = apart(of, params)
    way = [{path: values[path] - before[path] for path in params} for values in (of, params)]
    measured["way of the weights"] = apart(*way)
    assert {key: value for key, value in measured.items() if value > limits[key]} == {}


def _training_logits(experiment, state, batch):
    prepare = normalization(experiment.source.mean, experiment.source.std)

    def apply(variables, images):
        return experiment.model.apply(variables, prepare(images), train=True, mutable=["batch_stats"])[0]

    return np.asarray(quickly(jax.jit(apply), state.variables, batch["image"])(state.variables, batch["image"]))


def _gradients(experiment, state, batch, theirs):
    """(ours with the decay, theirs) of all parameters."""
    _, grads = quickly(experiment.loss_and_grads(), state, batch)(state, batch)
    decay = experiment.config.optimizer.weight_decay
    ours = jax.tree.map(lambda g, w: g + decay * w, grads, state.params)  # on everything, in CIFAR's recipe
    named = {f"params/{path}": value for path, value in flat(ours).items()}
    return named, {path: v for path, v in variables_of(theirs, "0/gradient:").items() if path.startswith("params")}


def _l2(experiment, variables):
    """What the decay adds to the loss, in float64."""
    options = experiment.config.optimizer
    paths = {path.removeprefix("params"): value for path, value in variables.items() if path.startswith("params")}
    decayed = [np.float64(value) for path, value in paths.items() if re.search(options.decay_mask, path)]
    return options.weight_decay / 2 * sum(float(np.sum(value * value)) for value in decayed)


def test_fine_tuning_step_equals_the_original(found, tmp_path, capsys):
    """From a checkpoint of r1; where the config has other shortcuts, its line says what to set."""
    checkpoint, run = found("cifar_v1") / "checkpoint" / "model.ckpt-7", tmp_path / "run"
    command = ["mixedres", "--config=cifar10:fp16,model=cifar_resnet20,data.name=synthetic,steps=1,batch_size=8"]
    command += [f"--config.init_from={checkpoint}", "--config.num_devices=1", f"--workdir={run}"]
    assert main.main([*command, "--config.model.projection=shape"]) == 2
    assert "set config.model.projection=stage" in capsys.readouterr().err and not run.exists()
    assert main.main(command) == 0
    assert "cifar_resnet20 of 10 classes, layout mixedres); from TensorFlow (r1)" in capsys.readouterr().out


def test_converted_checkpoint_records_the_padding(found, tmp_path, capsys):
    there = tmp_path / "out.safetensors"
    assert run_command("export", f"--from={found('r1_18') / 'saved_model'}", f"--to={there}") == 0
    assert "these weights need pool_padding=tensorflow, projection=stage" in capsys.readouterr().out
    file = checkpoints.read_weights(there)
    assert file.options == {"pool_padding": "tensorflow", "projection": "stage"} and file.input["resize"] == "official"
