"""A network that float16 harms at every loss scale, examined and cured: the second example of docs/numerics.md.

python -m experiments.numerics_example --html=layer_scale.html

Residual blocks behind factors of 1e-7 (layer scale at its start) and logits of several hundred. Prints the report, and
how far real weight gradients are off in float16 everywhere, in float16 as the report advises, and in bfloat16. Writes
experiments/results/numerics_example.json. Takes a quarter of a minute.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.lib import runs
from mixedres import numerics
from mixedres._internal import environment


class LayerScale(nn.Module):
    """A factor for every feature, tiny at first (Touvron et al., arXiv 2103.17239)."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        """(b, features) in any float dtype -> the same in `dtype`."""
        gamma = self.param("gamma", nn.initializers.constant(1e-7), (x.shape[-1],))
        return x.astype(self.dtype) * gamma.astype(self.dtype)[None]


class Network(nn.Module):
    """Three residual blocks of one dense layer; the modules in `keep` are float32, the others `dtype`."""

    dtype: Any
    keep: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x):
        """(b, features) -> logits (b, 10)."""

        def dtype(name):
            return jnp.float32 if name in self.keep else self.dtype

        x = nn.Dense(64, dtype=dtype("stem"), name="stem")(x)
        for i in range(3):
            y = nn.Dense(64, dtype=dtype(f"dense{i}"), name=f"dense{i}")(nn.relu(x))
            x = x + 1e6 * LayerScale(dtype(f"gamma{i}"), name=f"gamma{i}")(y).astype(jnp.float32)
        return nn.Dense(10, dtype=dtype("head"), name="head")(x)


def loss_in(dtype: Any, keep: tuple[str, ...] = ()):
    """The loss as a function of (params, images, labels, loss scale)."""

    def loss(params, x, labels, scale=1.0):
        logits = 512 * Network(dtype, keep).apply({"params": params}, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() * scale

    return loss


def batch():
    """64 examples: (x, labels)."""
    random = np.random.default_rng(0)
    return random.standard_normal((64, 16)).astype(np.float32), random.integers(10, size=64)


def errors(loss, scale, exact, *arguments) -> dict[str, float]:
    """Worst and median l2 error of a weight gradient, relative to `exact`."""
    found = jax.jit(lambda *a: jax.grad(loss)(*a, scale))(*arguments)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    shares = [float(np.linalg.norm(f / scale - e) / np.linalg.norm(e)) for f, e in pairs]
    return {"worst": max(shares), "median": float(np.median(shares))}


def main() -> None:
    """Examines, follows the advice, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", help="where to write the page; left out: nowhere")
    options = parser.parse_args()
    x, labels = batch()
    params = Network(jnp.float32).init(jax.random.key(0), x)["params"]

    report = numerics.examine(loss_in(jnp.float32), params, x, labels, title="Three blocks behind layer scale")
    print(report.to_text())
    if options.html:
        report.to_html(options.html)
    exact = jax.jit(jax.grad(loss_in(jnp.float32)))(params, x, labels)
    scale = report.recommended_scale
    # Without the advice, the best that any scale can do.
    everywhere = [errors(loss_in(jnp.float16), 2.0**s, exact, params, x, labels) for s in range(-14, -8)]
    results = {
        "advice": report.advice,
        "keep_float32": list(report.keep_float32),
        "recommended_scale": scale,
        "float16": min(everywhere, key=lambda found: found["worst"]),
        "float16 as advised": errors(loss_in(jnp.float16, report.keep_float32), scale, exact, params, x, labels),
        "bfloat16": errors(loss_in(jnp.bfloat16), 1.0, exact, params, x, labels),
    }
    for name in ("float16", "float16 as advised", "bfloat16"):
        print(f"{name + ':':<20} worst {results[name]['worst']:.2%}, median {results[name]['median']:.2%}")
    print(runs.write("numerics_example", results | {"versions": environment.versions()}))


if __name__ == "__main__":
    main()
