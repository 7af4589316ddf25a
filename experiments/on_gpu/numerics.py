"""Are the numbers right on this device? Gradients against float64, fused against plain, bits, histograms, overflow.

Every check gives a figure and what it may be at most; small shapes, because float64 is computed on the CPU.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from experiments.on_gpu import parts
from mixedres import models
from mixedres._internal.names import PRESETS
from mixedres._internal.tree import named_leaves
from mixedres.data import Batch
from mixedres.models import normalize
from mixedres.numerics.counting.histograms import BINS, exponents
from mixedres.train import losses, start, step
from mixedres.train.experiment import Experiment

SMALL = {"model.name": "resnet18", "data.image_size": 32, "data.num_classes": 10, "batch_size": 16}
SETTINGS = {"model.zero_init_last": False, "label_smoothing": 0.0}
# The largest relative error of the gradient: half more than what rounding to 11 bits (TF32, float16) and 8 bits gives
# on a CPU, 0.12 and 0.33, where JAX 0.12 has 5.9e-6 in float32. They were set after the first GPU was
# measured: the guesses before, 0.03 and 0.2, were exceeded there as on the CPU.
LIMITS = {"fp32": 1e-4, "tf32": 0.18, "fp16": 0.18, "bf16": 0.5}
STEPS = 3
# The option that asks XLA for programs with the same bits in every run.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
# Of the tiny form, whose time is that of compiling.
FEW = ("fp32", "fp16")


def measure(tiny: bool, out: pathlib.Path) -> dict[str, Any]:
    """All checks, as rows {'check', 'case', 'value', 'limit', 'passed'}."""
    keys = (parts.TINY if tiny else SMALL) | SETTINGS
    base = parts.experiment("fp32", keys)
    variables = jax.device_get(start.new_state(base).variables)
    batch = next(iter(base.source.train_batches(base.batch_size, seed=0, first_step=0)))
    rows = gradients(base, variables, batch, keys, FEW if tiny else PRESETS)
    compiled = {
        preset: ((one := parts.experiment(preset, keys)), one.train_step())
        for preset in (FEW[1:] if tiny else ("fp32", "bf16", "fp16_rewrite", "fp16"))
    }
    for options in ({}, DETERMINISTIC):
        rows += [determinism(preset, *pair, variables, batch, options) for preset, pair in compiled.items()]
    rows += [*histograms(base, variables, batch), *overflow(*compiled["fp16"], variables, batch)]
    for row in rows:
        row["passed"] = bool(row["value"] <= row["limit"])
    return {"keys": keys, "rows": rows}


def _fresh(experiment: Experiment, variables: Any) -> step.TrainState:
    """The state before the first step, with these weights."""
    state = step.init_state(variables, experiment.tx, ema=False)
    return experiment.place_state(jax.device_put(state, experiment.replicated_sharding))


def gradients(
    base: Experiment, variables: Any, batch: Batch, keys: dict[str, Any], presets: Sequence[str]
) -> list[dict[str, Any]]:
    """Relative l2 error of the gradient, with plain and fused norms, against float64 on the CPU."""
    exact = exact_gradient(base, variables, batch)
    found: dict[tuple[str, bool], np.ndarray] = {}
    for preset in presets:
        for fused in (False, True):
            one = parts.experiment(preset, keys | {"model.fused": str(fused).lower()})
            _, grads = one.loss_and_grads()(_fresh(one, variables), one.shard_batch(batch))
            found[preset, fused] = _flat(jax.device_get(grads))
    rows = []
    for (preset, fused), gradient in found.items():
        limit, form = LIMITS[preset.partition("_")[0]], "fused" if fused else "plain"
        rows.append(_row("gradient against float64", f"{preset}, {form}", _error(gradient, exact), limit))
        if fused:
            error = _error(gradient, found[preset, False])
            rows.append(_row("gradient, fused against plain", preset, error, 2 * limit))
    return rows


def exact_gradient(experiment: Experiment, variables: Any, batch: Batch) -> np.ndarray:
    """The gradient of the loss in float64 on the CPU, one vector."""
    config, wide = experiment.config, jmp.get_policy("params=float64,compute=float64,output=float64")
    options = {name: config.model[name] for name in models.OPTIONS}
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        model = models.create(
            config.model.name, num_classes=experiment.source.num_classes, policy=wide, norm_policy=wide, **options
        )
        params, statistics = jax.tree.map(jnp.float64, (variables["params"], variables["batch_stats"]))
        images = normalize.normalization(experiment.source.mean, experiment.source.std)(batch["image"])
        labels = jnp.asarray(batch["label"])

        def loss(params: Any) -> jax.Array:
            given = {"params": params, "batch_stats": statistics}
            logits, _ = model.apply(given, images.astype(jnp.float64), train=True, mutable=["batch_stats"])
            return losses.cross_entropy(logits, labels).mean()

        return _flat(jax.device_get(jax.jit(jax.grad(loss))(params)))


def determinism(
    preset: str, one: Experiment, train_step: Any, variables: Any, batch: Batch, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Parameters after some steps, twice from the same state: what share of them differs in a bit.

    The share has a limit only with compiler `options`, because convolutions of a GPU otherwise add in any order.
    """
    if options:
        train_step = train_step.lower(_fresh(one, variables), one.batch_shapes()).compile(options)
    ends = []
    for _ in range(2):
        state = _fresh(one, variables)
        for _ in range(STEPS):
            state, _ = train_step(state, one.shard_batch(batch))
        ends.append(_flat(jax.device_get(state.params), np.float32))
    differing = np.mean(ends[0].view(np.uint32) != ends[1].view(np.uint32))
    check, case = f"share of parameters that differ between two runs of {STEPS} steps", ", ".join([preset, *options])
    return _row(check, case, differing, 0.0 if options else 1.0)


def histograms(base: Experiment, variables: Any, batch: Batch) -> list[dict[str, Any]]:
    """The doctor's counts of exponents on the device against numpy's, of random bits and of a network's weights."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1_000_003, np.uint32)
    rows = [_row("counts that differ from numpy's", "random float32", _differing(bits.view(np.float32)), 0)]
    given = jax.device_put(variables, base.replicated_sharding)
    counted = jax.device_get(base.numerics_step()(given, base.shard_batch(batch))).parameters
    weights = named_leaves(variables["params"])
    wrong = sum(int((counted[name] != expected_counts(weights[name])).sum()) for name in weights)
    return [*rows, _row("counts that differ from numpy's", "weights, in a step that counts", wrong, 0)]


def _differing(x: np.ndarray) -> int:
    return int((jax.device_get(jax.jit(exponents)(x)) != expected_counts(x)).sum())


def expected_counts(x: np.ndarray) -> np.ndarray:
    """`numerics.counting.exponents` by numpy: 11 bits are kept, others round up from a half, but not to infinity."""
    bits = x.ravel().view(np.uint32) & 0x7FFFFFFF
    places = np.where(bits < 0x7F800000, np.minimum((bits + 0x1000) >> 23, BINS - 3), BINS - 2)
    return np.bincount(np.where(bits > 0x7F800000, BINS - 1, places), minlength=BINS).astype(np.uint32)


def overflow(one: Experiment, train_step: Any, variables: Any, images: Batch) -> list[dict[str, Any]]:
    """A step at a loss scale that float16 cannot take: nothing but the scale changes, and training goes on after it."""
    state, batch = _fresh(one, variables), one.shard_batch(images)
    scale = jax.tree.map(jnp.copy, state.loss_scale)
    scale = dataclasses.replace(scale, loss_scale=jnp.full_like(scale.loss_scale, 2.0**24))
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=scale))
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(_kept(state)))]
    state, _ = train_step(state, batch)
    after = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(_kept(state)))]
    changed = sum(one != two for one, two in zip(before, after, strict=True))
    first_scale = float(state.loss_scale.loss_scale)
    for _ in range(24):
        state, metrics = train_step(state, batch)
    return [
        _row("arrays that a skipped step changes", "fp16 at a loss scale of 2^24", changed, 0),
        _row("the loss scale after it, over half of what it was", "fp16", abs(first_scale / 2.0**23 - 1), 0.0),
        _row("steps still skipped after 25", "fp16", 1 - float(metrics["grads_finite"]), 0.0),
    ]


def _kept(state: Any) -> Any:
    return state.params, state.batch_stats, state.opt_state.inner_state


def _row(check: str, case: str, value: float, limit: float) -> dict[str, Any]:
    return {"check": check, "case": case, "value": float(value), "limit": float(limit)}


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else 1e300


def _flat(tree: Any, dtype: Any = np.float64) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, dtype).ravel() for leaf in jax.tree.leaves(tree)])
