"""optax.lbfgs with its line search: a network fitted to all of scikit-learn's digits at once, in float16.

    python examples/lbfgs.py  # 10 seconds: losses and accuracies, explain's summary, the doctor's advice

The arguments of the line search are without the loss scale: value is the loss, and value_fn is the function that the
search calls. update takes the gradients with their loss scale, as for every optimizer, and unscales grad too.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision


def init(key):
    """Returns float32 parameters."""
    keys = jax.random.split(key)
    hidden, head = jax.random.normal(keys[0], (64, 64)) / 8, jax.random.normal(keys[1], (64, 10)) / 8
    return {"hidden": hidden, "bias": jnp.zeros(64), "head": head}


def apply(params, x):
    """Images (b, 64) -> logits (b, 10)."""
    return jnp.tanh(numerics.tap(x @ params["hidden"] + params["bias"], "hidden")) @ params["head"]


def loss(params, images, labels):
    """Returns the mean cross-entropy plus a weight decay, in float32."""
    decay = 1e-4 * sum(jnp.square(weight).sum() for weight in jax.tree.leaves(params))
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean() + decay


def fit(loss_fn, loss_scale, images, labels, steps):
    """Fits in the precision of `loss_fn`; returns parameters, loss and number of skipped steps."""
    tx = precision.loss_scaled(optax.lbfgs(), loss_scale)

    def step(carry, _):
        params, state = carry

        def value_fn(params):
            return loss_fn(params, images, labels)

        value, grads = precision.value_and_grad(value_fn)(state, params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), length=steps)

    (params, state), losses = run(init(jax.random.key(0)))
    return params, float(losses[-1]), int(state.loss_scale.total_skipped)


def main(steps: int = 25) -> dict:
    """Fits in float32 and in float16, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    results = {}
    float16 = (autocast(loss), precision.DynamicLossScale())
    for name, changed in {"float32": (loss, precision.NoOpLossScale()), "float16": float16}.items():
        params, results[f"{name} loss"], results["skipped"] = fit(*changed, images, labels, steps)
        results[name] = float((apply(params, test_images).argmax(-1) == test_labels).mean())
        print(f"{name}: loss {results[f'{name} loss']:.4f}, {results[name]:.1%} of the test digits are right")
    results["explain"] = explain(loss)(params, images, labels).summary()
    results["doctor"] = numerics.examine(loss, params, images, labels).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    main()
