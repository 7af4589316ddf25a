"""What commands call on runs and weights, as functions of the folder that holds a mutant."""

import argparse
import functools
import gc
import json
import time

import jax

from mixedres import models
from mixedres._internal import console
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import checksums_hold
from mixedres.checkpoints import load, ownership, workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.config import recorded
from mixedres.predict import __main__ as predict_command
from mixedres.predict.classifier import from_args
from mixedres.predict.predictions import Prediction
from mixedres.train import start
from mixedres.train.builder import build
from mixedres.train.metrics.writers import MetricWriter
from tests.fuzz import corpus
from tests.fuzz.containers import CHECKSUMS


def weights(intact):
    """Those of files of weights."""
    _remember_shapes()
    experiment = build(corpus.config())
    shapes = experiment.variable_shapes

    def initialize(place):
        (path,) = place.iterdir()
        console.say(start.load_weights(str(path), shapes, experiment.model, experiment.source.input_spec).note)

    def predict(place):
        (path,) = place.iterdir()
        _classify(path)

    return [initialize, predict]


def metrics(intact):
    """Those of ``metrics.jsonl``."""

    def resume(place):
        writer = MetricWriter(place / workdir.METRICS, 1, evaluated=False)
        writer.write(2, "train", {"loss": 1.0})
        writer.close()
        for path in place.glob("events*"):
            path.unlink()

    return [resume]


def config_file(intact):
    """Those of ``config.json``."""

    def evaluate(place):
        build(recorded.get_config(str(place)))

    return [_continued(intact), evaluate]


def data_file(intact):
    """Those of ``data.json``; the checkpoint beside it, which is intact, is restored once."""
    _remember_shapes()
    load.Checkpoints = functools.partial(_ReadOnce, _restored(intact / "run" / workdir.CHECKPOINTS))
    data = json.loads((intact / "run" / workdir.DATA).read_text())

    def evaluate(place):
        workdir.check_data(place, data, classes_only=True)

    return [_continued(intact), evaluate, _classify]


def _continued(intact):
    """What the start of a run does that goes on in a folder."""
    config, data = (json.loads((intact / "run" / name).read_text()) for name in (workdir.CONFIG, workdir.DATA))

    def resume(place):
        with ownership.claim(place, config, clean=False, data=data):
            workdir.finished(place, config)

    return resume


def checkpoints(intact):
    """Those of checkpoints; Orbax gets only what the checksums let through, each mutant by one of two ways."""
    _remember_shapes()
    with corpus.smaller():
        experiment = build(corpus.config())
        jax.eval_shape(experiment.init_state)

    def holds(place):
        """Whether there is more to see than that the checksums do not hold; AssertionError where they should not."""
        step = place / workdir.CHECKPOINTS / "2"
        expected = json.loads((intact / "small_run" / workdir.CHECKPOINTS / "2" / CHECKSUMS).read_bytes())
        try:
            same = json.loads((step / CHECKSUMS).read_bytes()) == expected
        except (OSError, ValueError, RecursionError):
            same = False
        whole = same and all(
            _content(step / "default" / name) == _content(intact / "small_run" / "checkpoints" / "2" / "default" / name)
            for name in expected
        )
        found = checksums_hold(step / "default")
        assert not (same and found and not whole), "the checksums of other files hold"
        return found

    def resume(place):
        if not holds(place):
            raise ConfigError("the checkpoint is not whole")
        if _is_even(place):
            return
        restored.append(place)
        saved = Checkpoints(place / workdir.CHECKPOINTS)
        try:
            start.restore(experiment, saved)
        finally:
            saved.close()

    def predict(place):
        if _is_even(place) and checksums_hold(place / workdir.CHECKPOINTS / "2" / "default"):
            restored.append(place)
            load.read(place)

    def end(place):
        """As the process ends: what Orbax left half read must not speak."""
        if restored:
            restored.clear()
            time.sleep(0.01)
            gc.collect()

    restored = []
    return [resume, predict, end]


def _is_even(place):
    """Divides the mutants of checkpoints in two: restoring takes a hundred times as long as anything else here."""
    return sum(path.stat().st_size for path in place.glob("checkpoints/**/*") if path.is_file()) % 2 == 0


def _content(path):
    try:
        return path.read_bytes()
    except OSError:
        return None


def _classify(path):
    """Makes the classifier as `mixedres.predict` does, and prints the classes of an image."""
    options = {"labels": None, "precision": None, "image_size": None, "preprocessing": None}
    chosen = from_args(argparse.Namespace(source=str(path), **options))
    for note in chosen.notes:
        console.say(f"note: {note}")
    found = Prediction("image", [(index, 0.1) for index in range(len(chosen.class_names))])
    for as_json in (False, True):
        predict_command._show(found, chosen.class_names, as_json=as_json)


class _ReadOnce:
    """Checkpoints whose newest was restored before."""

    def __init__(self, restored, directory):
        self.restored = restored

    def latest_step(self):
        return 2

    def restore_newest(self, like):
        return self.restored

    def close(self):
        pass


def _restored(directory):
    saved = Checkpoints(directory)
    try:
        return saved.restore_newest(None)
    finally:
        saved.close()


def _remember_shapes():
    """Computes the shapes of each network once: `jax.eval_shape` takes longer than all else that reads weights."""
    computed = {}
    evaluate = jax.eval_shape

    def remembered(function, *arguments):
        owner = getattr(function, "__self__", None)
        if owner is None:
            return evaluate(function, *arguments)
        key = f"{owner}{arguments[1:]}" if isinstance(owner, models.ResNet) else id(owner)
        if key not in computed:
            computed[key] = evaluate(function, *arguments)
        return computed[key]

    jax.eval_shape = remembered
