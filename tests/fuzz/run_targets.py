"""What commands call on runs and weights, as functions of the folder that holds a mutant."""

import argparse
import contextlib
import gc
import json
import time

import jax

from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import checksums_hold
from mixedres._internal.formats import without_stamp
from mixedres.checkpoints import load, ownership, recorded, workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.predict import __main__ as predict_command
from mixedres.predict.classifier import read_classifier
from mixedres.predict.inference import Prediction
from mixedres.train import start, steps
from mixedres.train.builder import build
from mixedres.train.metrics.writers import MetricWriter
from tests.fuzz import corpus
from tests.fuzz.contents import CHECKSUMS, STEP


def weights(intact):
    """Returns the targets of files of weights."""
    _remember_shapes()
    experiment = build(corpus.config())
    shapes = steps.variable_shapes(experiment)

    def initialize(place):
        path = str(place / "mutant.safetensors")
        console.say(start.load_weights(path, shapes, experiment.model, experiment.source.input_spec).note)

    return [initialize, lambda place: _classify(place / "mutant.safetensors")]


def metrics(intact):
    """Returns the target of ``metrics.jsonl``."""

    def resume(place):
        writer = MetricWriter(place / workdir.METRICS, 1, evaluated=False)
        writer.write(2, "train", {"loss": 1.0})
        writer.close()

    return [resume]


def config_file(intact):
    """Returns the targets of ``config.json``."""
    return [_resume(intact / "run"), lambda place: build(recorded.get_config(str(place)))]


def data_file(intact):
    """Returns the targets of ``data.json``; the checkpoint beside it, which is intact, is restored once."""
    _remember_shapes()
    with contextlib.closing(Checkpoints(intact / "run" / workdir.CHECKPOINTS)) as saved:
        restored = saved.restore_newest(None)
    Checkpoints.restore_newest = lambda self, like, only=None: restored
    data = json.loads((intact / "run" / workdir.DATA).read_text())
    return [_resume(intact / "run"), lambda place: workdir.check_data(place, data, classes_only=True), _classify]


def _resume(run):
    """Returns what the start of a run calls that continues in a folder, with the config and data of this run."""
    config, data = (without_stamp(json.loads((run / name).read_text())) for name in (workdir.CONFIG, workdir.DATA))

    def resume(place):
        with ownership.claim(place, config, clean=False, data=data):
            workdir.finished(place, config)

    return resume


def checkpoints(intact):
    """Returns the targets of checkpoints; Orbax gets what passes the checksums."""
    _remember_shapes()
    experiment = build(corpus.config())

    def read(place):
        """Reads a checkpoint with right checksums as resuming or, if its size is odd, as `mixedres.predict` does."""
        if not checksums_hold(place / STEP):
            raise ConfigError("the checkpoint is not whole")
        expected = json.loads((intact / "run" / CHECKSUMS).read_bytes())
        if json.loads((place / CHECKSUMS).read_bytes()) == expected:
            for name in expected:
                same = (place / STEP / name).read_bytes() == (intact / "run" / STEP / name).read_bytes()
                assert same, f"{name} is another, and its checksum holds"
        if sum(path.stat().st_size for path in (place / STEP).rglob("*") if path.is_file()) % 2:
            return load.read_weights(place)
        with contextlib.closing(Checkpoints(place / workdir.CHECKPOINTS)) as saved:
            start.restore_newest(experiment, saved)

    def end(place):
        """Waits as a process does at its end: what Orbax left half read must not print."""
        time.sleep(0.01)
        gc.collect()

    return [read, end]


def _classify(path):
    """Makes the classifier as `mixedres.predict` does, and prints the classes of an image."""
    options = dict.fromkeys(("labels", "precision", "image_size", "preprocessing"))
    chosen = read_classifier(argparse.Namespace(source=str(path), **options))
    for note in chosen.notes:
        console.say(f"note: {note}")
    found = Prediction("image", [(index, 0.1) for index in range(len(chosen.class_names))])
    for as_json in (False, True):
        predict_command._show(found, chosen.class_names, as_json=as_json)


def _remember_shapes():
    """Computes the shapes of each network once: `jax.eval_shape` takes longer than all else that reads weights."""
    evaluate, computed = jax.eval_shape, {}

    def remembered(function, *arguments):
        if not hasattr(function, "__self__"):
            return evaluate(function, *arguments)
        key = repr((function, arguments[1:]))  # of a method with the network; the first argument is a random key
        if key not in computed:
            computed[key] = evaluate(function, *arguments)
        return computed[key]

    jax.eval_shape = remembered
