"""optax.MultiSteps: gradients of four small batches make one step, in float16 on scikit-learn's digits.

    python examples/gradient_accumulation.py  # 10 seconds: accuracies, what was skipped, explain's summary, advice

MultiSteps must be inside loss_scaled. A small batch that overflows is then left out, and the step uses another batch
instead. Around loss_scaled, MultiSteps would keep one infinity in its sum, and refuses gradients that carry a scale.
The loss scale starts far too high on purpose, so that the first batches overflow. Every batch that does not overflow is
part of a step.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision

EVERY = 4


def init(key):
    """Returns float32 weights of three dense layers."""
    shapes = ((64, 128), (128, 128), (128, 10))
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape) * (2 / shape[0]) ** 0.5 for k, shape in zip(keys, shapes, strict=True)]


def apply(weights, x):
    """Images (b, 64) -> logits (b, 10)."""
    for i, weight in enumerate(weights):
        x = numerics.tap((jax.nn.relu(x) if i else x) @ weight, f"layer{i}")  # a row of the doctor's report
    return x


def loss(params, images, labels):
    """Returns the mean cross-entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()


def train(loss_fn, loss_scale, images, labels, steps):
    """Returns trained parameters and optimizer state; only `loss_fn` and `loss_scale` depend on the precision."""
    tx = precision.loss_scaled(optax.MultiSteps(optax.adam(2e-3), EVERY), loss_scale)

    @jax.jit
    def step(params, state, images, labels):
        _, grads = precision.value_and_grad(loss_fn)(state, params, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = init(jax.random.key(0))
    state = tx.init(params)
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 32)):
        params, state = step(params, state, images[batch], labels[batch])
    return params, state


def main(steps: int = 400) -> dict:
    """Trains in float32 and in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    results = {}
    float16 = (autocast(loss), precision.DynamicLossScale(2.0**24))
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        params, state = train(*changed, images, labels, steps)
        results[name] = float((apply(params, test_images).argmax(-1) == test_labels).mean())
        results["skipped"], results["steps"] = int(state.loss_scale.total_skipped), int(state.inner_state.gradient_step)
        print(f"{name}: {results[name]:.1%} of the test digits are right")
        print(f"  {steps} batches, {results['skipped']} of them skipped: {results['steps']} steps of {EVERY} batches")
    results["explain"] = explain(loss)(params, images[:32], labels[:32]).summary()
    results["doctor"] = numerics.examine(loss, params, images[:32], labels[:32]).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
