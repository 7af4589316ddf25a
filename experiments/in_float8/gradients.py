"""The part `gradients`: errors of loss and gradient against float32, for the same weights and the same batch.

Operations run one by one: in a compiled program, XLA's CPU backend sums some products of half and of float8 operands in
bfloat16 (jaxlib 0.12, where it folds a transposition into the product), which a GPU does not.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from experiments.autocast_comparison import distance
from experiments.in_float8 import networks, tables
from experiments.in_float8.networks import CLASSES, Mlp
from experiments.lib import runs
from experiments.libraries import Loss, cross_entropy, integers, normal
from mixedres._internal import environment
from mixedres._internal.jax_compat import equations
from mixedres.autocast import Float8, autocast, explain
from mixedres.autocast.explain import is_float8

SEEDS = 5
EVERY, DEFAULT = "fp8, every size", "fp8"
DTYPES = {"bf16": "bf16", EVERY: Float8(min_size=0), DEFAULT: Float8()}
# Batches that Flax's own operations see before they are measured, with the weights unchanged.
WARM_UP = 16
HISTORY = fp8_ops.OVERWRITE_WITH_GRADIENT
# Of the dense network: large enough that the default size limit leaves two of its three hidden layers in float8.
DENSE = {"features": 512, "width": 1024, "batch": 2048}


def float8_products(loss: Loss, dtype: Any, *args: Any) -> tuple[int, int]:
    """(products in float8, all products) of the forward pass; the derivatives of those in float8 are, too."""
    products = [d for d in explain(loss, dtype)(*args).decisions if d.category == "allow"]
    return sum(is_float8(d.dtype) for d in products), len(products)


def written_float8(loss: Loss, *args: Any) -> tuple[int, int]:
    """The same of a program that casts by itself."""
    products = [e for e in equations(jax.make_jaxpr(loss)(*args)) if e.primitive.name == "dot_general"]
    return sum(all(is_float8(v.aval.dtype) for v in e.invars) for e in products), len(products)


def compare(
    loss: Loss, draw: Callable[[int], Any], seeds: Sequence[int], others: dict[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """The float32 loss of a network, and by variant its products and errors, a seed each.

    Args:
      loss: loss(params, inputs, labels), in float32.
      draw: seed -> its arguments.
      seeds: what is drawn.
      others: by name what gives (loss, gradient) for arguments from `draw`, beside autocast.
    """
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[Any], Any]] = {}
    for name, dtype in DTYPES.items():
        count = float8_products(loss, dtype, *draw(seeds[0]))
        if name == DEFAULT and count[0] in (0, found[EVERY]["float8"]):
            continue  # it is the same as another one
        found[name] = {"float8": count[0], "products": count[1]}
        steps[name] = _unpacked(jax.value_and_grad(autocast(loss, dtype)))
    steps |= others
    errors: dict[str, dict[str, list[float]]] = {name: {"gradient_error": [], "loss_error": []} for name in steps}
    exact = jax.jit(jax.value_and_grad(loss))
    values = []
    for seed in seeds:
        args = draw(seed)
        value, gradient = exact(*args)
        values.append(float(value))
        for name, step in steps.items():
            with jax.disable_jit():
                other, other_gradient = step(args)
            errors[name]["gradient_error"].append(distance(other_gradient, gradient))
            errors[name]["loss_error"].append(float(abs(other - value) / abs(value)))
    return {"loss": values, "variants": {name: found.get(name, {}) | errors[name] for name in steps}}


def _unpacked(step: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda args: step(*args)


def transformers(seeds: Sequence[int], sizes: dict[str, networks.Sizes]) -> list[dict[str, Any]]:
    """A row for every kind of transformer and library."""
    rows = []
    for kind, size in sizes.items():
        for library, make in networks.LIBRARIES.items():
            network = make(size)

            def draw(seed: int, network: Any = network, size: Any = size) -> Any:
                return network.convert(networks.weights(seed, size)), *networks.batch(1000 + 2 * seed, size)

            rows.append({"network": kind, "library": library} | compare(network.loss, draw, seeds, {}))
            print("\n".join(tables.gradients(rows[-1:])[2:]), flush=True)
    return rows


def loss_of(model: nn.Module) -> Loss:
    """The cross entropy of a Flax module, as loss(variables, x, labels)."""

    def loss(variables: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(variables, x).astype(jnp.float32), labels)

    return loss


def dense(seeds: Sequence[int], features: int, width: int, batch: int) -> dict[str, Any]:
    """The row of the dense network, with what Flax itself offers: dtype=bfloat16, and float8 in the hidden layers.

    Flax scales by the largest magnitudes of earlier steps: 'cold' is the first step, whose scales are 1.
    """

    def data(seed: int) -> Any:
        return normal(seed, batch, features), integers(seed + 1, CLASSES, batch)

    def draw(seed: int) -> Any:
        variables = Mlp(width).init(jax.random.key(seed), jnp.zeros((1, features)))
        return variables, *data(1000 + 2 * seed)

    half = loss_of(Mlp(width, dtype=jnp.bfloat16))
    eighth_model = Mlp(width, dtype=jnp.bfloat16, product=fp8_ops.Fp8DirectDotGeneralOp)
    eighth = loss_of(eighth_model)
    start = eighth_model.init(jax.random.key(0), jnp.zeros((1, features)))[HISTORY]
    step = jax.value_and_grad(eighth)

    def cold(args: Any, history: Any = start) -> Any:
        value, gradient = step(args[0] | {HISTORY: history}, *args[1:])
        return value, {"params": gradient["params"]}

    def warm(args: Any) -> Any:
        history = start
        for other in range(WARM_UP):
            history = step(args[0] | {HISTORY: history}, *data(5000 + 2 * other))[1][HISTORY]
        return cold(args, history)

    own = {
        "Flax, dtype=bfloat16": (_unpacked(jax.value_and_grad(half)), 0),
        f"Flax fp8_ops, after {WARM_UP} steps": (warm, 1),
        "Flax fp8_ops, cold": (cold, 1),
    }
    row = compare(loss_of(Mlp(width)), draw, seeds, {name: one for name, (one, _) in own.items()})
    variables, *rest = draw(seeds[0])
    counts = [written_float8(half, variables, *rest), written_float8(eighth, variables | {HISTORY: start}, *rest)]
    for name, (_, index) in own.items():
        row["variants"][name] |= dict(zip(("float8", "products"), counts[index], strict=True))
    return {"network": "dense", "library": "Flax Linen"} | row


def run(options: argparse.Namespace) -> None:
    """Measures all networks, prints the table and writes the results."""
    seeds = range(options.seeds or SEEDS)
    rows = [*transformers(seeds, networks.SIZES), dense(seeds, **DENSE)]
    print("\n".join(["", *tables.gradients(rows)]))
    facts = {"device": environment.device(jax.devices()[:1]), "versions": environment.versions()}
    facts |= {"seeds": len(seeds), "warm_up": WARM_UP, "dense": DENSE}
    facts |= {"sizes": {kind: dataclasses.asdict(size) for kind, size in networks.SIZES.items()}, "rows": rows}
    print(runs.write(f"float8_{options.name or 'gradients'}", facts))
