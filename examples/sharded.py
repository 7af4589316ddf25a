"""Sharded training: batches over four devices and weights over two, in float16 on scikit-learn's digits.

    python examples/sharded.py  # 15 seconds: losses on one and on eight devices, explain's summary, the doctor's advice

The step does not mention devices: jit divides it by the sharding of its arguments, under autocast too. Gradients are
means over the whole batch, so all devices apply or skip the same steps, and there is one loss scale. On a CPU the eight
devices are simulated. On GPUs the program needs eight, or JAX_PLATFORMS=cpu.
"""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from mixedres import autocast, explain, numerics, precision

SPECS = {"up": P(None, "model"), "down": P("model", None), "head": P()}


def init(key):
    """Returns float32 parameters on one device."""
    keys = jax.random.split(key, 3)
    shapes = {"up": (64, 512), "down": (512, 64), "head": (64, 10)}
    return {n: jax.random.normal(k, s) / s[0] ** 0.5 for (n, s), k in zip(shapes.items(), keys, strict=True)}


def loss(params, images, labels):
    """Returns the mean cross-entropy in float32."""
    x = images + jax.nn.relu(images @ params["up"]) @ params["down"]
    logits = jax.nn.relu(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(mesh, images, labels, steps):
    """Trains in float16 over the mesh; returns parameters, optimizer state and losses."""
    tx = precision.loss_scaled(optax.adam(1e-3), precision.DynamicLossScale())

    @jax.jit
    def step(params, state, images, labels):
        value, grads = precision.value_and_grad(autocast(loss))(state, params, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.device_put(init(jax.random.key(0)), {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})
    state, rows, losses = jax.jit(tx.init)(params), NamedSharding(mesh, P("data")), []
    for batch in np.random.default_rng(0).integers(len(images), size=(steps, 128)):
        params, state, value = step(params, state, *jax.device_put((images[batch], labels[batch]), rows))
        losses.append(value)
    return params, state, np.array(losses)


def main(steps: int = 120) -> dict:
    """Trains on one device and on eight, and returns what it prints."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    results = {}
    for data, model in ((1, 1), (4, 2)):
        devices = np.array(jax.devices()[: data * model]).reshape(data, model)
        params, state, losses = train(jax.sharding.Mesh(devices, ("data", "model")), images, labels, steps)
        results[data * model] = losses
        print(f"{data * model} devices: loss {losses[0]:.4f} at first, {losses[-10:].mean():.4f} at the end")
    results |= {"params": params, "state": state, "explain": explain(loss)(params, images, labels).summary()}
    print(f"up is {params['up'].sharding.spec}, its Adam moments are {state.inner_state[0].mu['up'].sharding.spec}")
    results["doctor"] = numerics.examine(loss, params, images, labels).advice
    print(f"explain: {results['explain']}\ndoctor: {results['doctor']}")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; without effect on GPUs
    main()
