"""Keras 3 on JAX with a custom loop: a convolutional network with batch norm on scikit-learn's digits.

    KERAS_BACKEND=jax python examples/keras_loop.py  # 15 seconds: explain's summary, the doctor's advice, accuracies

stateless_call is the model as a function of its variables, so any optax optimizer can train them. The step selects the
new or the old statistics of batch norm by grads_finite. At the end all variables are assigned to the model.
"""

import jax
import jmp
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision

keras.utils.set_random_seed(0)
layers = [keras.Input((8, 8, 1))]
for features, strides in ((16, 1), (32, 2)):
    layers += [keras.layers.Conv2D(features, 3, strides, "same"), keras.layers.BatchNormalization(momentum=0.9)]
    layers += [keras.layers.ReLU()]
model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])


def loss(params, others, images, labels):
    """Returns the mean cross-entropy in float32, and the new values of the other variables."""
    logits, others = model.stateless_call(params, others, images, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), others


def train(loss_fn, loss_scale, params, others, images, labels, steps):
    """Returns trained values of all variables; only `loss_fn` and `loss_scale` depend on the precision."""
    tx = precision.loss_scaled(optax.adam(3e-3), loss_scale)

    @jax.jit
    def step(params, others, state, images, labels):
        value_and_grad = precision.value_and_grad(loss_fn, has_aux=True)
        (_, new), grads = value_and_grad(state, params, others, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), jmp.select_tree(state.grads_finite, new, others), state

    state = tx.init(params)
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 64)):
        params, others, state = step(params, others, state, images[batch], labels[batch])
    return params, others


def main(steps: int = 120) -> dict:
    """Trains in float32 and in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    variables = model.trainable_variables + model.non_trainable_variables
    params, others = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    first = (params, others, images[:128], labels[:128])
    results = {
        "explain": explain(loss)(*first).summary(),
        "doctor": numerics.examine(loss, *first, has_aux=True).advice,
    }
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    float16 = (autocast(loss), precision.DynamicLossScale())
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        trained = train(*changed, params, others, images, labels, steps)
        for variable, value in zip(variables, jax.tree.leaves(trained), strict=True):
            variable.assign(value)
        results[name] = float((model.predict(test_images, verbose=0).argmax(-1) == test_labels).mean())
        print(f"{name}: {results[name]:.1%} of the test digits are right")
    return results


if __name__ == "__main__":
    main()
