"""What does dynamic loss scaling cost? The same float16 step with it, with no scale, and without any check at all.

python -m experiments.loss_scale_overhead --rounds=60

ResNet-20 on synthetic 32x32 images, batch 128. The three steps take turns, in a new random order every round, so that
a slow moment of the machine meets all of them; the result is the median over rounds of the ratio of times within one,
with a bootstrap interval. "none" checks and counts without a scale. Run it on an idle machine. Prints a table and
writes experiments/results/loss_scale_overhead.json.
"""

import argparse
import os
import random
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from experiments.lib import runs
from mixedres import data, models, precision
from mixedres._internal import environment
from mixedres._internal.mesh import make_mesh
from mixedres.models import normalize
from mixedres.train import optimizers, step
from mixedres.train.gradients import StepOptions

BATCH = 128


def unchecked(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` in the place of a loss-scaled optimizer: no scale, no finite check, and every step is taken."""

    def init(params):
        return precision.LossScaledState(tx.init(params), precision.NoOpLossScale(), jnp.asarray(True))

    def update(grads, state, params, **unused):
        del unused
        updates, inner = tx.update(grads, state.inner_state, params)
        return updates, precision.LossScaledState(inner, state.loss_scale, jnp.asarray(True))

    return optax.GradientTransformationExtraArgs(init, update)


def make(tx: optax.GradientTransformation, preset: str, name: str = "cifar_resnet20"):
    """(compiled step, state, batch) of a network in `preset`."""
    chosen = precision.get(preset)
    source = data.load("synthetic", image_size=32, batch_size=BATCH, num_classes=10, train_examples=BATCH)
    model = models.create(
        name,
        num_classes=10,
        policy=chosen.policy,
        norm_policy=chosen.norm_policy,
        precision=chosen.matmul_precision,
    )
    mesh = make_mesh(jax.devices()[:1])
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put(step.init_state(variables, tx, ema=False), sharding)
    batch = jax.device_put(next(source.train_batches(BATCH, seed=0)), sharding)
    options = StepOptions(apply_fn=model.apply, normalize=normalize.by_channel(source.mean, source.std), tx=tx)
    train_step = step.jit_train_step(mesh, options)
    return train_step.lower(state, batch).compile(), state, batch


def main() -> None:
    """Times the steps in turns and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--preset", default="fp16")
    options = parser.parse_args()
    tx = optimizers.create("sgd", optimizers.schedule("constant", peak=0.01, total_steps=1), weight_decay=1e-4)
    contenders = {
        "dynamic": make(precision.loss_scaled(tx, precision.DynamicLossScale()), options.preset),
        "none": make(precision.loss_scaled(tx, precision.NoOpLossScale()), options.preset),
        "unchecked": make(unchecked(tx), options.preset),
    }
    states = {name: state for name, (_, state, _) in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for index in range(options.rounds + 3):
        random.Random(index).shuffle(order)
        for name in order:
            compiled, _, batch = contenders[name]
            started = time.perf_counter()
            states[name], metrics = compiled(states[name], batch)
            jax.block_until_ready(metrics)
            if index >= 3:  # the first rounds warm up
                times[name].append(time.perf_counter() - started)

    rows = [
        {"step": name, "to": baseline, **runs.paired_ratio(times[name], times[baseline])}
        for name, baseline in (("dynamic", "unchecked"), ("dynamic", "none"), ("none", "unchecked"))
    ]
    print("| step | to | median ratio | 95 % interval |\n|---|---|---|---|")
    for row in rows:
        low, high = row["interval"]
        print(f"| {row['step']} | {row['to']} | {row['ratio']:.4f} | {low:.4f} to {high:.4f} |")
    results = {
        "preset": options.preset,
        "rounds": options.rounds,
        "load_average": os.getloadavg(),
        "median_ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "device": environment.device(jax.devices()[:1]),
        "versions": environment.versions(),
        "rows": rows,
    }
    print(runs.write("loss_scale_overhead", results))


if __name__ == "__main__":
    main()
