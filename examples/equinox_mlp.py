"""Equinox: a network of two hidden layers on scikit-learn's digits, in float32 and in float16, and a broken weight.

    python examples/equinox_mlp.py  # 10 seconds: accuracies, explain's summary, the doctor's finding

The module is the argument of the loss. autocast casts its arrays where they are used and passes everything else
through. The optimizer gets only the arrays, as Equinox recommends. first_nonfinite names the leaf that is infinite.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision


class Network(eqx.Module):
    """One image (64,) -> logits (10,)."""

    hidden: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.hidden, self.norm = eqx.nn.MLP(64, 128, 128, depth=1, key=keys[0]), eqx.nn.LayerNorm(128)
        self.head = eqx.nn.Linear(128, 10, key=keys[1])

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.norm(self.hidden(x))))


def loss(model, images, labels):
    """Returns the mean cross-entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


def train(loss_fn, loss_scale, images, labels, steps):
    """Returns the trained model and optimizer state; only `loss_fn` and `loss_scale` depend on the precision."""
    model = Network(jax.random.key(0))
    tx = precision.loss_scaled(optax.adamw(3e-3), loss_scale)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    value_and_grad = precision.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)

    @eqx.filter_jit
    def step(model, state, images, labels):
        _, grads = value_and_grad(state, model, images, labels)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 128)):
        model, state = step(model, state, images[batch], labels[batch])
    return model, state


def main(steps: int = 200) -> dict:
    """Trains in float32 and in float16, breaks a weight, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    results = {}
    float16 = (autocast(loss), precision.DynamicLossScale())
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        model, state = train(*changed, images, labels, steps)
        results[name] = float((jax.vmap(model)(test_images).argmax(-1) == test_labels).mean())
        results["skipped"] = int(state.loss_scale.total_skipped)
        print(f"{name}: {results[name]:.1%} of the test digits are right, {results['skipped']} steps were skipped")
    results["explain"] = explain(loss)(model, images[:128], labels[:128]).summary()
    broken = eqx.tree_at(lambda model: model.head.weight, model, replace_fn=lambda w: w.at[3, 5].set(jnp.inf))
    names = ("model", "images", "labels")
    results["doctor"] = str(numerics.first_nonfinite(autocast(loss), broken, images[:128], labels[:128], names=names))
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
