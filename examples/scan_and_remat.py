"""Plain JAX: a transformer with its layers in a scan and rematerialized, on scikit-learn's digits.

    python examples/scan_and_remat.py  # 15 seconds: accuracy, explain's summary, the doctor's finding

autocast rewrites the bodies of scan and checkpoint. Products are half in the forward pass, in its recomputation and in
the backward pass. The carry of the scan, here the residual stream, stays float32. Then a weight of the third layer is
made too large, and first_nonfinite names the operation that overflows, its line, and the iteration of the scan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from mixedres import autocast, explain, numerics, precision

WIDTH, LAYER = 64, {"qkv": (3, 64, 192), "out": (3, 64, 64), "up": (3, 64, 256), "down": (3, 256, 64)}
SHAPES = {"embed": (8, WIDTH), "position": (8, WIDTH), "head": (WIDTH, 10), **LAYER}


def init(key):
    """Returns float32 parameters; the first axis of the parameters in LAYER is the layer."""
    keys = zip(SHAPES.items(), jax.random.split(key, len(SHAPES)), strict=True)
    return {name: jax.random.normal(key, shape) / shape[-2] ** 0.5 for (name, shape), key in keys}


def layer(x, weights):
    """Returns the result of a layer, (b, tokens, width), and None, because the scan has nothing to stack."""
    q, k, v = jnp.split(jax.nn.standardize(x) @ weights["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.mT / WIDTH**0.5) @ v @ weights["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.silu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"], None


def apply(params, images):
    """Images (b, 8, 8), each row of pixels a token, -> logits (b, 10)."""
    x = images @ params["embed"] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, {name: params[name] for name in LAYER})
    return jax.nn.standardize(x).mean(1) @ params["head"]


def loss(params, images, labels):
    """Returns the mean cross-entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()


clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))  # inside loss_scaled, for unscaled gradients
tx = precision.loss_scaled(clipped, precision.DynamicLossScale())


@jax.jit
def step(params, state, images, labels):
    """Returns parameters and optimizer state after one step in float16."""
    _, grads = precision.value_and_grad(autocast(loss))(state, params, images, labels)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def main(steps: int = 200) -> dict:
    """Trains in float16, breaks a weight, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=360, random_state=0)
    params = init(jax.random.key(0))
    state = tx.init(params)
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 64)):
        params, state = step(params, state, images[batch], labels[batch])
    accuracy = float((apply(params, test_images).argmax(-1) == test_labels).mean())
    summary = explain(loss)(params, images[:64], labels[:64]).summary()
    broken = params | {"up": params["up"].at[2].mul(1e6)}
    finding = numerics.first_nonfinite(autocast(loss), broken, images[:64], labels[:64])
    print(f"float16: {accuracy:.1%} of the test digits are right\nexplain: {summary}\ndoctor: {finding}")
    return {"float16": accuracy, "explain": summary, "doctor": str(finding), "params": params}


if __name__ == "__main__":
    main()
