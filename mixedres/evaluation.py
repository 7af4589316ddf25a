"""Evaluation of trained weights: in the precision of the config, or the same ones in several precisions."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mixedres import compilation_cache, data, initial, loop, losses, precision, start, summary, workdir
from mixedres.build import build
from mixedres.config import ConfigError
from mixedres.processes import ALONE, Processes
from mixedres.setup import Setup
from mixedres.step import Metrics, TrainState

# What an evaluation of a finished run must share with its training; devices and batch size may differ.
EVALUATED = ("model.", "batch_norm.", "data.", "precision.", "ema_decay", "optimizer.name", "optimizer.layer_decay")
EVALUATED += ("train_only",)
# What predictions are compared with.
BASELINE = "fp32"


def evaluate(config: ConfigDict, directory: pathlib.Path, *, group: Processes = ALONE) -> dict[str, Any]:
    """Evaluates the newest checkpoint in `directory` and returns top1, top5, loss and examples.

    Where there is no run, but weights in ``config.init_from``, these are. Writes nothing but compiled programs.

    Raises:
      ConfigError: for a mistake in the config, and where there are no weights for it.
    """
    setup = build(config)
    with compilation_cache.kept(config.compilation_cache, directory, group):
        state, what = _weights(setup, directory, group)
        with group.loop():
            result = loop.evaluate(setup, setup.eval_step(), state, group=group)
    assert result is not None  # without a signal it goes to its end
    print(f"{what}: {summary.describe(result)}")
    return result


def compare(
    config: ConfigDict, directory: pathlib.Path, presets: Sequence[str], *, group: Processes = ALONE
) -> dict[str, dict[str, Any]]:
    """Evaluates one set of weights under several presets, on the same images, and prints a line for each.

    Args:
      config, directory, group: as for `evaluate`.
      presets: names; `BASELINE` is added where it is missing.

    Returns:
      {preset: {'top1', 'top5', 'examples', 'changed', 'nonfinite'}}, the baseline first; 'changed' is the number of
      test images whose most probable class is another than in the baseline, 'nonfinite' that of images for which the
      network returns an infinity or NaN.

    Raises:
      ConfigError: as `evaluate`.
    """
    setup = build(config)
    with compilation_cache.kept(config.compilation_cache, directory, group):
        state, what = _weights(setup, directory, group)
        names = list(dict.fromkeys((BASELINE, *presets)))
        print(f"{what}, in {len(names)} precisions:")
        steps = {name: _tally(setup, precision.get(name)) for name in names}
        with jax.transfer_guard("allow"):
            sums = {name: jax.tree.map(partial(jax.device_put, device=setup.replicated), _no_sums()) for name in names}
        in_flight = loop.InFlight()
        batches = setup.source.eval_batches(setup.batch_size, shard=setup.shard)
        with group.loop(), data.Prefetch(batches, setup.put) as ready:
            for index, batch in enumerate(ready):
                group.progress(index)
                expected = None
                for name, tally in steps.items():
                    sums[name], classes = tally(state.eval_variables, batch, expected, sums[name])
                    expected = classes if expected is None else expected
                in_flight.push(index, sums[names[-1]])
        results = {name: _shares(jax.device_get(found)) for name, found in sums.items()}
    for line in _table(results):
        print(line)
    return results


def _weights(setup: Setup, directory: pathlib.Path, group: Processes) -> tuple[TrainState, str]:
    """The state to evaluate, and what it is; announces it."""
    start.agree(setup, directory, group)
    given, compared = setup.config.init_from, EVALUATED
    if given and workdir.contents(directory)["checkpoints"]:
        compared += ("init_from",)  # or one would be told of the run, and take it for the weights
    elif given:
        found = initial.load(given, setup.variable_shapes, setup.model)
        if "head" not in found.variables["params"]:
            raise ConfigError(f"config.init_from={given} has a head for other classes, so there is nothing to evaluate")
        summary.announce(setup, directory)
        return start.fresh(setup, found), f"weights of {given}"
    workdir.check_same(directory, setup.resolved, compared)
    workdir.check_data(directory, setup.data, classes_only=True)
    state = start.newest(setup, directory)
    if state is None:
        raise ConfigError(f"--workdir={directory} has no checkpoint yet; train first, without --mode=eval")
    summary.announce(setup, directory)
    return state, f"step {int(state.step)}"


def _tally(setup: Setup, chosen: precision.Precision) -> Callable[..., Any]:
    """The jitted (variables, batch, expected classes or None, sums) -> (sums, classes) in a precision."""
    apply_fn = chosen.rewrite(setup.in_precision(chosen).model.clone(axis_name=None).apply)

    def tally(variables: Any, batch: Any, expected: jax.Array | None, sums: Metrics) -> tuple[Metrics, jax.Array]:
        logits = apply_fn(variables, setup.normalize_fn(batch["image"]), train=False).astype(jnp.float32)
        classes = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        counts = {
            "top1": losses.in_top_k(logits, batch["label"], 1),
            "top5": losses.in_top_k(logits, batch["label"], 5),
            "examples": jnp.ones_like(batch["mask"]),
            "changed": classes != (classes if expected is None else expected),
            # Of these the class means nothing.
            "nonfinite": ~jnp.isfinite(logits).all(-1),
        }
        return {name: sums[name] + jnp.sum(values & batch["mask"]) for name, values in counts.items()}, classes

    return jax.jit(tally, out_shardings=(setup.replicated, setup.split))


def _no_sums() -> Metrics:
    return {name: jnp.zeros((), jnp.int32) for name in ("top1", "top5", "examples", "changed", "nonfinite")}


def _shares(sums: dict[str, Any]) -> dict[str, Any]:
    examples = int(sums["examples"])
    if not examples:
        raise data.DataError("none of the test images can be read")
    shares = {name: int(sums[name]) / examples for name in ("top1", "top5")}
    return shares | {"examples": examples} | {name: int(sums[name]) for name in ("changed", "nonfinite")}


def _table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'':<14} {'top-1':>8} {'top-5':>8}   predictions that differ from {BASELINE}"]
    for name, found in results.items():
        share = found["changed"] / found["examples"]
        differ = "" if name == BASELINE else f"   {found['changed']} of {found['examples']} ({share:.2%})"
        warning = f"   NOT FINITE: {found['nonfinite']} of {found['examples']}" if found["nonfinite"] else ""
        lines.append(f"{name:<14} {found['top1']:>8.2%} {found['top5']:>8.2%}{differ}{warning}")
    return lines
