"""Models to examine, in float32 and in real half precision: a ResNet, a transformer, and one that is badly scaled."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from sklearn import datasets

from mixedres import models, numerics
from mixedres.train import losses
from tests import ROOT

F32, F16 = jnp.float32, jnp.float16


@dataclasses.dataclass
class Case:
    """loss(dtype)(params, batch, scale) -> the scaled loss as computed in that dtype."""

    loss: Callable[[Any], Callable[..., jax.Array]]
    params: Any
    batch: Any


def resnet(*, loss_by: float = 1.0, batch: int = 16, stages: tuple[int, ...] = (1, 1)) -> Case:
    """A ResNet of one block a stage, on the digits that scikit-learn carries."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images[:batch].reshape(-1, 8, 8, 1) / 16).repeat(3, -1).astype(np.float32)
    networks = {}
    for dtype in (F32, F16):
        network = models.create("cifar_resnet8", num_classes=10, policy=jmp.Policy(F32, dtype, F32))
        networks[dtype] = network.clone(stage_sizes=stages)
    variables = jax.jit(networks[F32].init)(jax.random.key(0, impl="rbg"), images[:1])

    def loss(dtype):
        def fn(params, batch, scale):
            images, labels = batch
            everything = {"params": params, "batch_stats": variables["batch_stats"]}
            logits, _ = networks[dtype].apply(everything, images, train=True, mutable=["batch_stats"])
            return losses.cross_entropy(logits, labels).mean() * loss_by * scale

        return fn

    return Case(loss, variables["params"], (images, labels[:batch].astype(np.int32)))


class Block(nn.Module):
    """Attention and two dense layers, each behind a norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        return x + nn.Dense(32, dtype=self.dtype)(nn.relu(nn.Dense(64, dtype=self.dtype)(y)))


class Transformer(nn.Module):
    """Of 20 letters, which is the next."""

    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(20, 32, dtype=self.dtype, name="embed")(tokens)
        x = Block(self.dtype, name="block")(x)
        return nn.Dense(20, dtype=self.dtype, name="head")(nn.LayerNorm(dtype=self.dtype)(x))


def transformer() -> Case:
    """Sequences that count in steps of 1 to 3."""
    rng = np.random.default_rng(0)
    tokens = (rng.integers(20, size=(16, 1)) + rng.integers(1, 4, size=(16, 1)) * np.arange(13)) % 20

    def loss(dtype):
        def fn(params, tokens, scale):
            logits = Transformer(dtype).apply({"params": params}, tokens[:, :-1]).astype(F32)
            return losses.cross_entropy(logits.reshape(-1, 20), tokens[:, 1:].reshape(-1)).mean() * scale

        return fn

    params = jax.jit(Transformer(F32).init)(jax.random.key(0), tokens[:, :-1])["params"]
    return Case(loss, params, jnp.asarray(tokens))


@functools.cache
def layer_scale():
    """The example of docs/numerics.md, as a module."""
    spec = importlib.util.spec_from_file_location("layer_scale", ROOT / "examples" / "layer_scale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def badly_scaled(keep: tuple[str, ...] = ()) -> Case:
    """The sick example of docs/numerics.md; `keep` lists the modules in float32."""
    example = layer_scale()

    def loss(dtype):
        fn = example.loss_in(dtype, keep)
        return lambda params, batch, scale: fn(params, *batch, scale)

    params = jax.jit(example.Network(F32).init)(jax.random.key(0), example.x)["params"]
    return Case(loss, params, (example.x, example.labels))


CASES = {
    "ResNet": resnet,
    "transformer": transformer,
    "ResNet, tiny loss": lambda: resnet(loss_by=2.0**-12),
    "tiny factors, huge logits": badly_scaled,
}


@functools.cache
def examined(name: str) -> tuple[Case, numerics.Report]:
    """One of `CASES` and its report."""
    case = CASES[name]()
    return case, numerics.examine(case.loss(F32), case.params, case.batch, 1.0, title=name)


def worst_errors(case: Case, *log2_scales: int) -> list[float]:
    """Largest l2 errors of a weight gradient in float16 at the scales 2**log2_scale, relative to float32."""
    exact = jax.jit(lambda: jax.grad(case.loss(F32))(case.params, case.batch, 1.0))()
    grad = jax.jit(lambda scale: jax.grad(case.loss(F16))(case.params, case.batch, scale))

    def worst(scale):
        pairs = zip(jax.tree.leaves(grad(scale)), jax.tree.leaves(exact), strict=True)
        norm = np.linalg.norm
        return max(norm(np.asarray(found) / scale - e) / norm(e) for found, e in pairs if norm(e))

    return [worst(2.0**log2_scale) for log2_scale in log2_scales]
