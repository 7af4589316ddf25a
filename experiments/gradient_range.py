"""Where do the gradients of a network lie, and what of them can float16 hold?

python -m experiments.gradient_range --config=configs/digits.py:fp32
python -m experiments.gradient_range --config=configs/digits.py:fp32 --workdir=runs/digits-fp32

Takes one training batch through the network in float32, as it is at the start or in the newest checkpoint of --workdir,
and counts the magnitudes of the gradients of every convolution's output, which a float16 step holds in float16. Prints
what float16 loses of them under several loss scales, and writes gradient_range_NAME.json and .png to
experiments/results, with a histogram against the range of float16.
"""

import argparse
import pathlib
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import plots, runs
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.checkpoints import workdir
from mixedres.checkpoints.manager import Checkpoints
from mixedres.config import flags as command_flags
from mixedres.models.layers import Conv
from mixedres.train import losses
from mixedres.train.builder import build
from mixedres.train.experiment import Experiment

# float16: the largest value, the smallest normal one, and half of the smallest subnormal one, which rounds to zero.
LARGEST, NORMAL, ZERO = 65504.0, 2.0**-14, 2.0**-25
SCALES = (1.0, 2.0**4, 2.0**8, 2.0**12, 2.0**15)
BINS = np.arange(-60, 21)


def activation_gradients(experiment: Experiment, variables: Any, batch: Any) -> dict[str, np.ndarray]:
    """{path of a convolution: gradient of the mean loss with respect to its output}, float32."""
    images, labels = experiment.normalize_fn(jnp.asarray(batch["image"])), jnp.asarray(batch["label"])

    def logits_and_shapes(added: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
        shapes = {}

        def add(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = call(*args, **kwargs)
            if not isinstance(context.module, Conv) or context.method_name != "__call__":
                return out
            name = "/".join(context.module.path)
            shapes[name] = jax.ShapeDtypeStruct(out.shape, out.dtype)
            return out + added[name] if name in added else out

        with nn.intercept_methods(add):
            logits, _ = experiment.model.apply(variables, images, train=True, mutable=["batch_stats"])
        return logits, shapes

    def loss(added: dict[str, jax.Array]) -> jax.Array:
        return losses.cross_entropy(logits_and_shapes(added)[0], labels, experiment.config.label_smoothing).mean()

    found: dict[str, Any] = {}
    jax.eval_shape(lambda: found.update(logits_and_shapes({})[1]))
    zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in found.items()}
    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(zeros))


def held(magnitudes: np.ndarray, scale: float) -> dict[str, float]:
    """Shares of values that, multiplied by `scale`, float16 rounds to zero, holds as subnormals, and cannot hold."""
    scaled = magnitudes.astype(np.float64) * scale
    return {
        "scale": scale,
        "lost": float(np.mean(scaled <= ZERO)),
        "subnormal": float(np.mean((scaled > ZERO) & (scaled < NORMAL))),
        "overflow": float(np.mean(scaled > LARGEST)),
    }


def main(argv: list[str]) -> int:
    """Measures and draws; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gradient_range",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="configs/digits.py:fp32", help="FILE:PRESET; the preset must be float32")
    parser.add_argument("--workdir", type=pathlib.Path, help="a run of that config (default: the state at the start)")
    parser.add_argument("--name", default="digits", help="of the files of results (default digits)")
    options, rest = parser.parse_known_args(argv)
    try:
        config = command_flags.parse(["x", f"--config={options.config}", "--config.num_devices=1", *rest]).config
        experiment = build(config)
        if experiment.precision.policy.compute_dtype != jnp.float32:
            raise ConfigError(f"--config={options.config} computes in half; name a float32 preset such as :fp32")
        state = jax.jit(experiment.init_state)()
        if options.workdir:
            saved = Checkpoints((options.workdir / workdir.CHECKPOINTS).absolute())
            if saved.latest_step() is None:
                raise ConfigError(f"--workdir={options.workdir} has no checkpoint; train there first")
            state = saved.restore_newest(state)[0]
    except (ConfigError, OSError, ValueError) as error:
        print(f"gradient_range: {error}", file=sys.stderr)
        return 2
    batch = next(
        iter(experiment.source.train_batches(experiment.batch_size, seed=config.seed, first_step=int(state.step)))
    )
    gradients = activation_gradients(experiment, state.variables, batch)
    magnitudes = np.abs(np.concatenate([gradient.ravel() for gradient in gradients.values()]))
    magnitudes = magnitudes[magnitudes > 0]
    shares = [held(magnitudes, scale) for scale in SCALES]
    print(f"{len(gradients)} convolutions, {magnitudes.size:,} gradients that are not zero, step {int(state.step)}")
    print("\n| loss scale | rounded to zero | subnormal | too large |\n|---:|---:|---:|---:|")
    for share in shares:
        print(f"| {share['scale']:g} | {share['lost']:.2%} | {share['subnormal']:.2%} | {share['overflow']:.2%} |")
    counts, _ = np.histogram(np.log2(magnitudes), BINS)
    result = {"versions": environment.versions(), "step": int(state.step), "shares": shares}
    result |= {"log2_from": int(BINS[0]), "share_per_octave": (counts / magnitudes.size).tolist()}
    path = runs.write(f"gradient_range_{options.name}", result)
    title = f"{config.model.name} on {config.data.name}, batch {experiment.batch_size}, step {int(state.step)}"
    plots.save(plots.gradient_range(BINS, counts / magnitudes.size, SCALES, title), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
