"""Flax Linen: a convolutional network with batch norm on scikit-learn's digits, with TrainState, in float16.

    python examples/flax_linen.py  # 10 seconds: the doctor's advice, explain's summary, the accuracy

The doctor counts the results of all Linen modules, and the dynamic loss scale starts at its recommended scale. Modules
are named scopes, so keep_float32 matches the last layer by its name. A skipped step must not change the batch
statistics, so the step selects the old ones by grads_finite.
"""

import flax.linen as nn
import jax
import jmp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision


class Network(nn.Module):
    """Images (b, 8, 8, 1) -> logits (b, 10)."""

    @nn.compact
    def __call__(self, x, train):
        for i, features in enumerate((16, 32)):
            x = nn.Conv(features, (3, 3), strides=i + 1, name=f"conv{i}")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm{i}")(x))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


class TrainState(train_state.TrainState):
    """TrainState of Flax with batch statistics."""

    batch_stats: dict


def loss(params, batch_stats, images, labels):
    """Returns the mean cross-entropy in float32, and the new batch statistics."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = Network().apply(variables, images, True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]


@jax.jit
def step(state, images, labels):
    """Returns the state after one step in float16."""
    half_loss = autocast(loss, keep_float32="^/head$")
    value_and_grad = precision.value_and_grad(half_loss, has_aux=True)
    (_, batch_stats), grads = value_and_grad(state, state.params, state.batch_stats, images, labels)
    new = state.apply_gradients(grads=grads)
    return new.replace(batch_stats=jmp.select_tree(new.opt_state.grads_finite, batch_stats, state.batch_stats))


def main(steps: int = 120) -> dict:
    """Examines, trains in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    variables = Network().init(jax.random.key(0), images[:1], False)
    first = (variables["params"], variables["batch_stats"], images[:128], labels[:128])
    report = numerics.examine(loss, *first, has_aux=True)
    summary = explain(loss, keep_float32="^/head$")(*first).summary()
    tx = precision.loss_scaled(optax.adam(3e-3), precision.DynamicLossScale(report.recommended_scale))
    state = TrainState.create(apply_fn=Network().apply, tx=tx, **variables)
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 128)):
        state = step(state, images[batch], labels[batch])
    logits = Network().apply({"params": state.params, "batch_stats": state.batch_stats}, test_images, False)
    accuracy = float((logits.argmax(-1) == test_labels).mean())
    print(f"doctor: {report.advice}\nexplain: {summary}\nfloat16: {accuracy:.1%} of the test digits are right")
    return {"float16": accuracy, "explain": summary, "doctor": report.advice, "state": state}


if __name__ == "__main__":
    main()
