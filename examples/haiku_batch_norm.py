"""Haiku: a network with batch norm on scikit-learn's digits, in float32, float16 and bfloat16.

    python examples/haiku_batch_norm.py  # 15 seconds: accuracies, explain's summary, the doctor's advice

Put autocast around the result of hk.transform_with_state, not inside it. bfloat16 has the range of float32 and needs
no loss scale; NoOpLossScale keeps the loop the same. In a skipped step, grads_finite keeps the old state of batch norm.
"""

import haiku as hk
import jax
import jmp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision


@hk.transform_with_state
def network(images, is_training):
    """Images (b, 64) -> logits (b, 10)."""
    x = images
    for i, features in enumerate((128, 64)):
        x = numerics.tap(hk.Linear(features, with_bias=False)(x), f"linear{i}")  # a row of the doctor's report
        x = jax.nn.relu(hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training))
    return hk.Linear(10)(x)


def loss(params, state, images, labels):
    """Returns the mean cross-entropy in float32, and the new state of the network."""
    logits, state = network.apply(params, state, None, images, True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


def train(loss_fn, loss_scale, images, labels, steps):
    """Returns trained parameters and network state; only `loss_fn` and `loss_scale` depend on the precision."""
    params, state = network.init(jax.random.key(0), images[:1], True)
    tx = precision.loss_scaled(optax.adam(3e-3), loss_scale)

    @jax.jit
    def step(params, state, opt_state, images, labels):
        value_and_grad = precision.value_and_grad(loss_fn, has_aux=True)
        (_, new), grads = value_and_grad(opt_state, params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), jmp.select_tree(opt_state.grads_finite, new, state), opt_state

    opt_state = tx.init(params)
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 64)):
        params, state, opt_state = step(params, state, opt_state, images[batch], labels[batch])
    return params, state


def main(steps: int = 120) -> dict:
    """Trains in three precisions, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    results = {}
    for name, loss_fn, loss_scale in (
        ("float32", loss, precision.NoOpLossScale()),
        ("float16", autocast(loss, "float16"), precision.DynamicLossScale()),
        ("bfloat16", autocast(loss, "bfloat16"), precision.NoOpLossScale()),
    ):
        params, state = train(loss_fn, loss_scale, images, labels, steps)
        logits, _ = network.apply(params, state, None, test_images, False)
        results[name] = float((logits.argmax(-1) == test_labels).mean())
        print(f"{name}: {results[name]:.1%} of the test digits are right")
    results["explain"] = explain(loss)(params, state, images[:128], labels[:128]).summary()
    results["doctor"] = numerics.examine(loss, params, state, images[:128], labels[:128], has_aux=True).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
