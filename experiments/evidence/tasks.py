"""Four networks that are no ResNet, each with real data: weights, losses, batches."""

import dataclasses
import functools
import importlib.util
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.io

from mixedres._internal.errors import ConfigError
from mixedres.data import load

CHARACTERS, LENGTH = 96, 32  # of the alphabet: ASCII with one for all controls; that a network reads
NO_MODULES = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "encodings"}
REGIONS = 4  # the map of the graph has 4 x 4
FASHION = "/usr/share/datasets/fashion-mnist"

Weights = Any  # a pytree of float32 arrays
Batch = dict[str, np.ndarray]  # arrays that say the same if all are reversed along their first axis
Outcome = dict[str, jax.Array]  # "loss" and perhaps "top1", each (examples,)


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and its data."""

    weights: Callable[[jax.Array], Weights]  # of a key
    outcome: Callable[[Weights, Batch], Outcome]
    batch: Callable[[np.random.Generator], Batch]
    held_out: Batch
    units: int  # modules, crossings or images of `held_out`; each has as many examples
    sure: Batch  # of the shape of a batch, small enough to be memorized
    rate: float  # Adam's first step size
    steps: int
    sure_steps: int  # until float32 has a loss below 0.01 of `sure`


def initial(**shapes: tuple[int, ...]) -> Callable[[jax.Array], Weights]:
    """Returns a function of a key: gains of 1 for one axis, else random weights that keep the variance of inputs."""

    def weight(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.ones(shape) if len(shape) == 1 else jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))

    return lambda key: dict(zip(shapes, map(weight, jax.random.split(key, len(shapes)), shapes.values()), strict=True))


def norm(x: jax.Array, gain: jax.Array, axes: int | tuple[int, ...] = -1) -> jax.Array:
    """Returns `x` with mean 0 and variance 1 over the axes, times the gain."""
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + 1e-5) * gain


def classified(logits: jax.Array, labels: Any) -> Outcome:
    """Returns cross-entropy and top-1 of each example, with their means over further axes of the labels."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    right = (logits.argmax(-1) == labels).astype(jnp.float32)
    return {name: x.reshape(len(x), -1).mean(1) for name, x in (("loss", -chosen), ("top1", right))}


def text_task(weights: Any, logits: Callable[[Weights, jax.Array], jax.Array], **options: Any) -> Task:
    """Returns the prediction of the next character of Python's standard library; each eighth module is held out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not NO_MODULES & set(path.relative_to(root).parts)]
    texts = [np.frombuffer(path.read_bytes(), np.uint8).clip(31, 126) - 31 for path in paths]
    texts = [text.astype(np.int32) for text in texts if len(text) > 4000]
    training = np.concatenate([text for i, text in enumerate(texts) if i % 8])
    held_out = np.stack([text[i : i + LENGTH + 1] for text in texts[::8] for i in range(500, 4000, 500)])

    def batch(generator: np.random.Generator) -> Batch:
        return {"text": training[generator.integers(len(training) - LENGTH, size=(16, 1)) + np.arange(LENGTH + 1)]}

    def outcome(p: Weights, batch: Batch) -> Outcome:
        return classified(logits(p, batch["text"][:, :-1]), batch["text"][:, 1:])

    # Windows with equal first characters would have a least loss above zero.
    sure = {"text": held_out[np.unique(held_out[:, 0], return_index=True)[1][:16]]}
    return Task(weights, outcome, batch, {"text": held_out}, len(held_out) // 7, sure, **options)


def gpt(width: int = 32, layers: int = 2, heads: int = 4) -> Task:
    """Returns a transformer with its norms before the layers, and with its table as the head."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    shapes |= {"gain1": (width,), "gain2": (width,)}
    tables = {"table": (CHARACTERS, width), "place": (LENGTH, width), "gain": (width,)}
    weights = initial(**tables, **{f"{name}{i}": shapes[name] for i in range(layers) for name in shapes})

    def attend(qkv: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        share = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", share, v).reshape(*qkv.shape[:2], width)

    def logits(p: Weights, text: jax.Array) -> jax.Array:
        x = p["table"][text] + p["place"]
        for i in range(layers):
            x = x + attend(norm(x, p[f"gain1{i}"]) @ p[f"qkv{i}"]) @ p[f"out{i}"]
            x = x + jax.nn.gelu(norm(x, p[f"gain2{i}"]) @ p[f"up{i}"]) @ p[f"down{i}"]
        return norm(x, p["gain"]) @ p["table"].T

    return text_task(weights, logits, rate=6e-3, steps=1200, sure_steps=400)


def gru(width: int = 96) -> Task:
    """Returns a gated recurrent network."""
    table, head = (CHARACTERS, 3 * width), (width, CHARACTERS)
    weights = initial(table=table, gates=(width, 2 * width), candidate=(width, width), head=head)

    def logits(p: Weights, text: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            reset, keep = jnp.split(jax.nn.sigmoid(x[:, : 2 * width] + h @ p["gates"]), 2, -1)
            new = jnp.tanh(x[:, 2 * width :] + (reset * h) @ p["candidate"])
            h = keep * h + (1 - keep) * new
            return h, h

        inputs = jnp.moveaxis(p["table"][text], 1, 0)
        return jnp.moveaxis(jax.lax.scan(cell, jnp.zeros((len(text), width)), inputs)[1], 0, 1) @ p["head"]

    return text_task(weights, logits, rate=4e-3, steps=1000, sure_steps=1000)


def graph(width: int = 16, heads: int = 4, layers: int = 3) -> Task:
    """Returns a graph attention network that tells the region of crossings from the places of half of all others.

    Raises ConfigError if PyGSP, whose wheel has Minnesota's roads, is not installed.
    """
    if (found := importlib.util.find_spec("pygsp")) is None:
        raise ConfigError("the roads of Minnesota are in a package that is missing; pip install pygsp")
    path = pathlib.Path(found.origin or "").parent / "data" / "pointclouds" / "minnesota.mat"
    file = scipy.io.loadmat(path, spmatrix=False)
    edges = np.argwhere(file["A"].toarray() + np.eye(len(file["xy"])) > 0)  # with loops
    places = np.float32((file["xy"] - file["xy"].mean(0)) / file["xy"].std(0))
    regions = (places.argsort(0).argsort(0) * REGIONS // len(places)) @ [REGIONS, 1]
    known, hidden = np.array_split(np.random.default_rng(0).permutation(len(places)), 2)
    # A hidden place has an input too: norms of zero would multiply its gradients by 300 in each layer.
    is_hidden, features = np.array([0, 0, 1], np.float32), np.pad(places, ((0, 0), (0, 1)))
    features[hidden] = is_hidden
    size = width * heads
    shapes = {"dense": (size, size), "gain": (size,), "sender": (width, heads), "receiver": (width, heads)}

    def attend(h: jax.Array, senders: jax.Array, receivers: jax.Array, edges: Any) -> jax.Array:
        sender, receiver = edges.T
        total = functools.partial(jax.ops.segment_sum, segment_ids=receiver, num_segments=len(h))
        scores = [jnp.einsum("nhw,wh->nh", h, p)[ends] for p, ends in ((senders, sender), (receivers, receiver))]
        scores = jax.nn.leaky_relu(scores[0] + scores[1], 0.2)
        share = jnp.exp(scores - jax.ops.segment_max(scores, receiver, len(h))[receiver])
        return total((share / total(share)[receiver])[..., None] * h[sender]).reshape(len(h), size)

    def outcome(p: Weights, batch: Batch) -> Outcome:
        x = jnp.asarray(features).at[batch["nodes"]].set(is_hidden) @ p["first"]
        for i in range(layers):
            h = (norm(x, p[f"gain{i}"]) @ p[f"dense{i}"]).reshape(len(x), heads, width)
            x = x + jax.nn.elu(attend(h, p[f"sender{i}"], p[f"receiver{i}"], batch["edges"]))
        return classified(x[batch["nodes"]] @ p["head"], jnp.asarray(regions)[batch["nodes"]])

    def batch(generator: np.random.Generator) -> Batch:
        return {"edges": edges, "nodes": generator.choice(known, 128, replace=False)}

    ends = {"first": (3, size), "head": (size, REGIONS**2)}
    weights = initial(**ends, **{f"{name}{i}": shapes[name] for i in range(layers) for name in shapes})
    held_out, sure = {"edges": edges, "nodes": hidden}, batch(np.random.default_rng(0))
    return Task(weights, outcome, batch, held_out, len(hidden), sure, rate=5e-3, steps=400, sure_steps=250)


def denoiser(width: int = 16) -> Task:
    """Returns a convolutional network that removes noise from images; its loss is in variances of the pixels."""
    source: Any = load("idx", dir=FASHION, image_size=28, batch_size=1)
    channels = {"down1": (1, width), "down2": (width, 2 * width), "middle": (2 * width, 2 * width)}
    channels |= {"up2": (2 * width, width), "up1": (2 * width, width), "head": (width + 1, 1)}

    form = ("NHWC", "HWIO", "NHWC")
    convolve = functools.partial(jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=form)

    def layer(p: Weights, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        x = convolve(x, p[name], (stride, stride))
        groups = norm(x.reshape(*x.shape[:3], 4, -1), p[f"{name}_gain"].reshape(4, -1), (1, 2, 4))
        return jax.nn.silu(groups).reshape(x.shape)

    def outcome(p: Weights, batch: Batch) -> Outcome:
        noisy = batch["image"] + batch["noise"]
        fine = layer(p, "down1", noisy, 2)
        x = layer(p, "middle", layer(p, "down2", fine, 2))
        x = jnp.concatenate([layer(p, "up2", x.repeat(2, 1).repeat(2, 2)), fine], -1)
        x = jnp.concatenate([layer(p, "up1", x.repeat(2, 1).repeat(2, 2)), noisy], -1)
        return {"loss": jnp.square(convolve(x, p["head"], (1, 1)) - batch["image"]).mean((1, 2, 3))}

    def with_noise(generator: np.random.Generator, images: np.ndarray) -> Batch:
        images = (images - np.float32(source.mean)) / np.float32(source.std)
        return {"image": images, "noise": generator.standard_normal(images.shape, np.float32)}

    def batch(generator: np.random.Generator) -> Batch:
        return with_noise(generator, source.train_images[generator.integers(source.train_examples, size=16)])

    kernels = {name: (3, 3, *shape) for name, shape in channels.items()}
    weights = initial(**kernels, **{f"{name}_gain": shape[-1:] for name, shape in channels.items()})
    held_out = with_noise(np.random.default_rng(0), source.eval_images[:500])
    sure = {name: np.repeat(x[:2], 8, 0) for name, x in held_out.items()}
    return Task(weights, outcome, batch, held_out, 500, sure, rate=2e-3, steps=250, sure_steps=250)


TASKS = {"GPT": gpt, "GRU": gru, "graph": graph, "denoiser": denoiser}
