"""Flax NNX: a convolutional network with batch norm and dropout on scikit-learn's digits, in float32 and float16.

    python examples/flax_nnx.py  # 15 seconds: accuracies, skipped steps, explain's summary, the doctor's advice

The model is an argument of the function under autocast, so that running statistics and random streams are updated as
with nnx.jit. The loss scale starts far too high on purpose: the first steps overflow, are skipped, and halve it. The
forward pass of a skipped step may also have overflowed, so the step restores the old running statistics.
"""

import jmp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision


class Network(nnx.Module):
    """Images (b, 8, 8, 1) -> logits (b, 10)."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1, self.norm1 = nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(16, 32, (3, 3), 2, rngs=rngs), nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout, self.head = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(numerics.tap(self.conv1(x), "conv1")))  # a tap is a row of the doctor's report
        x = nnx.relu(self.norm2(numerics.tap(self.conv2(x), "conv2")))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def loss(model, images, labels):
    """Returns the mean cross-entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def train(loss_fn, loss_scale, images, labels, steps):
    """Returns the trained model and optimizer state; only `loss_fn` and `loss_scale` depend on the precision."""
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, precision.loss_scaled(optax.adam(3e-3), loss_scale), wrt=nnx.Param)
    value_and_grad = precision.value_and_grad(loss_fn, transform=nnx.value_and_grad)

    @nnx.jit
    def step(model, optimizer, images, labels):
        old = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        _, grads = value_and_grad(optimizer, model, images, labels)
        optimizer.update(model, grads)
        new = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, jmp.select_tree(precision.find_state(optimizer).grads_finite, new, old))

    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 64)):
        step(model, optimizer, images[batch], labels[batch])
    return model, precision.find_state(optimizer)


def main(steps: int = 120) -> dict:
    """Trains in float32 and in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    results = {}
    float16 = (autocast(loss), precision.DynamicLossScale(2.0**24))
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        model, state = train(*changed, images, labels, steps)
        model.eval()
        results[name] = float((model(test_images).argmax(-1) == test_labels).mean())
        results["skipped"] = int(state.loss_scale.total_skipped)
        print(f"{name}: {results[name]:.1%} of the test digits are right, {results['skipped']} steps were skipped")
    model.train()
    results["explain"] = explain(loss)(model, images[:128], labels[:128]).summary()
    results["doctor"] = numerics.examine(loss, model, images[:128], labels[:128]).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
