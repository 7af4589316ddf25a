"""Flax Linen: a network that float16 harms at every loss scale, and the layers that the doctor keeps in float32.

    python examples/layer_scale.py  # 15 seconds: the doctor's advice, errors of real gradients without and with it

The network has residual blocks behind factors of 1e-7 (layer scale; Touvron et al., arXiv 2103.17239), and logits of
several hundred. docs/numerics.md discusses the doctor's report."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mixedres import numerics

random = np.random.default_rng(0)
x, labels = random.standard_normal((64, 16)).astype(np.float32), random.integers(10, size=64)


class LayerScale(nn.Module):
    """Layer with a factor for every feature, initially 1e-7."""

    dtype: type

    @nn.compact
    def __call__(self, x):
        gamma = self.param("gamma", nn.initializers.constant(1e-7), (1, x.shape[-1]))
        return x.astype(self.dtype) * gamma.astype(self.dtype)


class Network(nn.Module):
    """Network of three residual blocks; the modules named in `keep` are float32, the others `dtype`."""

    dtype: type
    keep: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        def named(kind, name, *args):
            return kind(*args, dtype=jnp.float32 if name in self.keep else self.dtype, name=name)

        x = named(nn.Dense, "stem", 64)(x)
        for i in range(3):
            y = named(nn.Dense, f"dense{i}", 64)(nn.relu(x))
            x = x + 1e6 * named(LayerScale, f"gamma{i}")(y).astype(jnp.float32)
        return named(nn.Dense, "head", 10)(x)


def loss_in(dtype, keep=()):
    """Returns the loss as a function of (params, images, labels, loss scale)."""

    def loss(params, x, labels, scale=1.0):
        logits = 512 * Network(dtype, keep).apply({"params": params}, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() * scale

    return loss


def error(loss, scale, params, exact):
    """Returns the largest l2 error of a weight gradient, relative to `exact`."""
    found = jax.jit(lambda p: jax.grad(loss)(p, x, labels, scale))(params)
    off = jax.tree.map(lambda f, e: float(np.linalg.norm(f / scale - e) / np.linalg.norm(e)), found, exact)
    return max(jax.tree.leaves(off))


def main() -> dict:
    """Examines, follows the advice, and returns what it prints."""
    params = Network(jnp.float32).init(jax.random.key(0), x)["params"]
    report = numerics.examine(loss_in(jnp.float32), params, x, labels, title="Three blocks behind layer scale")
    exact = jax.jit(jax.grad(loss_in(jnp.float32)))(params, x, labels)
    half, advised = loss_in(jnp.float16), loss_in(jnp.float16, report.keep_float32)
    results = {"float16": min(error(half, 2.0**s, params, exact) for s in range(-14, -8))}  # at its best scale
    results["advised"] = error(advised, report.recommended_scale, params, exact)
    results["bfloat16"] = error(loss_in(jnp.bfloat16), 1.0, params, exact)
    print(report.advice, *(f"{name}: off by at most {value:.2%}" for name, value in results.items()), sep="\n")
    return results | {"doctor": report.advice}


if __name__ == "__main__":
    main()
