"""Runs TensorFlow's official ResNets and writes what they compute, and their checkpoints: python -m ... FOLDER.

In a process of its own, with the Keras that they were written for (TF_USE_LEGACY_KERAS=1, package tf_keras). The
network and the schedule of the custom loop are the original's code, of the package tf-models-official 2.2.0; those of
r1 are written out in `tests.original.r1`.
"""

import importlib
import os
import pathlib
import sys
import types

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}

import numpy as np
import tensorflow as tf
import tf_keras

from tests.original import cases, r1

v1 = tf.compat.v1


def values_like(named, variance):
    """Starting values by name: norms with means, deviations and scales of their own, so that an exchange would show."""
    rng = np.random.default_rng(0)
    made = {}
    for name in sorted(named):
        shape, leaf = named[name].shape, name.rpartition("/")[2]
        if leaf in ("gamma", "moving_variance"):
            made[name] = rng.uniform(0.8, 1.2, shape)
        elif leaf in ("beta", "moving_mean", "bias"):
            made[name] = rng.normal(0, 0.05, shape)
        else:
            made[name] = np.clip(rng.normal(size=shape), -2, 2) * np.sqrt(variance / np.prod(shape[:-1]))
    return {name: np.float32(value) for name, value in made.items()}


def bare(name):
    return name.removesuffix(":0")


def run_r1(case, folder):
    """Two steps of a network of r1, and its checkpoints: name-based, and as a SavedModel."""
    with tf.Graph().as_default(), v1.Session() as session:
        images = v1.placeholder(tf.float32, (None, case.side, case.side, 3), "images")
        options = {"size": case.size, "version": case.version, "num_classes": case.classes, "cifar": case.cifar}
        logits = r1.resnet(images, training=True, **options)
        step = v1.train.get_or_create_global_step()
        learning_rate = r1.rate(step, batch_size=case.batch, images=case.examples, **case.schedule)
        decays = (lambda name: True) if case.cifar else (lambda name: "batch_normalization" not in name)
        take, loss, pairs = r1.train_op(
            logits, case.labels, learning_rate=learning_rate, weight_decay=case.weight_decay, decays=decays, step=step
        )
        session.run(v1.global_variables_initializer())
        variables = (v for v in v1.global_variables() if not v.name.endswith("Momentum:0") and v is not step)
        network = {bare(v.name): v for v in variables}
        start = values_like(network, 1.0)
        for name, variable in network.items():
            variable.load(start[name], session)
        save_r1(session, folder, images, logits)
        written = {}
        for index in range(case.steps):
            fetches = {"loss": loss, "rate": learning_rate, "logits": logits, "take": take}
            fetches |= {f"gradient:{bare(v.name)}": gradient for gradient, v in pairs}
            found = session.run(fetches, {images: case.images})
            written |= {f"{index}/{key}": value for key, value in found.items() if key != "take"}
            written |= {f"{index}/after:{name}": v for name, v in session.run(network).items()}
    np.savez(folder / "found.npz", **written)
    evaluate_r1(case, folder, options)


def save_r1(session, folder, images, logits):
    v1.train.Saver().save(session, str(folder / "checkpoint" / "model.ckpt"), global_step=7)
    v1.saved_model.simple_save(session, str(folder / "saved_model"), {"images": images}, {"logits": logits})


def evaluate_r1(case, folder, options):
    """Logits in evaluation, from the checkpoint."""
    with tf.Graph().as_default(), v1.Session() as session:
        images = v1.placeholder(tf.float32, (None, case.side, case.side, 3), "images")
        logits = r1.resnet(images, training=False, **options)
        v1.train.Saver().restore(session, str(folder / "checkpoint" / "model.ckpt-7"))
        np.save(folder / "evaluated.npy", session.run(logits, {images: case.images}))


def original_loop():
    """The modules of the original (tf-models-official), with the Keras that TensorFlow had then.

    What they import for flags, estimators and pruning is left out.
    """
    for name in ("tensorflow_model_optimization", "official.utils.flags", "official.utils.misc"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["official.utils.flags"].core = sys.modules["official.utils.misc"].keras_utils = None
    private = importlib.import_module("tensorflow.python.keras")
    for name in ("backend", "initializers", "models", "regularizers"):
        sys.modules[f"tensorflow.python.keras.{name}"] = getattr(tf_keras, name)
        setattr(private, name, getattr(tf_keras, name))
    package = "official.vision.image_classification.resnet"
    return importlib.import_module(f"{package}.resnet_model"), importlib.import_module(f"{package}.common")


def run_loop(case, folder):
    """Two steps of the custom loop, and its checkpoints: object-based, and as a SavedModel."""
    model_code, common = original_loop()
    # The original has 224 pixels and a base rate of 0.1 written into its code.
    sized = lambda shape, **options: tf_keras.layers.Input((case.side, case.side, 3), **options)  # noqa: E731
    model_code.layers = types.SimpleNamespace(**vars(tf_keras.layers) | {"Input": sized})
    common.BASE_LEARNING_RATE = case.base
    model = model_code.resnet50(case.classes)
    steps = {"boundaries": list(case.boundaries), "multipliers": [1.0, *case.factors]}
    learning_rate = common.PiecewiseConstantDecayWithWarmup(case.batch, case.examples, case.warmup_epochs, **steps)
    optimizer = tf_keras.optimizers.legacy.SGD(learning_rate, momentum=0.9)
    network = {bare(v.name): v for v in model.weights}
    start = values_like(network, 2.0)
    for name, variable in network.items():
        variable.assign(start[name])
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(folder / "checkpoint" / "ckpt"))
    model.save(folder / "saved_model", save_format="tf")
    before_softmax = tf_keras.Model(model.input, model.get_layer("fc1000").output)
    np.save(folder / "evaluated.npy", before_softmax(case.images, training=False))

    @tf.function
    def take():
        with tf.GradientTape() as tape:
            probabilities = model(case.images, training=True)
            each = tf_keras.losses.sparse_categorical_crossentropy(case.labels, probabilities)
            loss = tf.reduce_sum(each) / case.batch + tf.reduce_sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        rate = learning_rate(tf.cast(optimizer.iterations, tf.float32))  # as the optimizer calls it
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, rate, probabilities, gradients

    written = {}
    for index in range(case.steps):
        loss, rate, probabilities, gradients = take()
        written |= {f"{index}/loss": loss, f"{index}/rate": rate, f"{index}/probabilities": probabilities}
        named = zip(model.trainable_variables, gradients, strict=True)
        written |= {f"{index}/gradient:{bare(v.name)}": gradient for v, gradient in named}
        written |= {f"{index}/after:{name}": variable.numpy() for name, variable in network.items()}
    np.savez(folder / "found.npz", **written)


def main(folder, names):
    for name in names:
        place = folder / name
        place.mkdir(parents=True)
        (run_loop if cases.ALL[name].is_loop else run_r1)(cases.ALL[name], place)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
