"""Float8 products in programs that XLA compiles for a GPU without having one: which kernels, and what they move."""

import argparse
import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.in_float8 import tables
from experiments.lib import hlo, runs
from experiments.lib.gpus import GPUS, without_cache
from mixedres._internal import environment
from mixedres._internal.errors import ConfigError
from mixedres.autocast import Float8, autocast

TOKENS, LENGTH, WIDTH, HEADS = 8192, 1024, 1024, 16
# By default XLA computes products in kernels of Triton's, or, where its tuning on the device finds them faster, of
# cuBLASLt's. Without a device nothing is tuned, and an option of the compiler tells which.
BACKENDS = {"Triton": {}, "cuBLASLt": {"xla_gpu_enable_triton_gemm": False}}
PRECISIONS: dict[str, Any] = {"bf16": "bf16", "fp8": "fp8", "fp8, every product": Float8(min_size=0)}


def _normalized(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """The feed-forward half of a block, (tokens, width)."""
    return x + jax.nn.gelu(_normalized(x) @ params["up"]) @ params["down"]


def block(params: Any, x: jax.Array) -> jax.Array:
    """A pre-norm transformer block, (sequences, length, width), with causal attention."""
    h = _normalized(x)
    query, key, value = ((h @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) / np.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), value).reshape(x.shape)
    return mlp(params, x + mixed @ params["out"])


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """{name: (loss of (params, x), shapes)}. Two of a kind follow each other, as in a network: the last differs."""
    square = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    wide = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def loss(layer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, x: jnp.square(layer(params[1], layer(params[0], x))).mean()

    def shapes(sizes: dict[str, tuple[int, int]], x: tuple[int, ...]) -> tuple[Any, ...]:
        params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
        return [params, params], jax.ShapeDtypeStruct(x, jnp.float32)

    return {
        "two MLPs": (loss(mlp), shapes(wide, (TOKENS, WIDTH))),
        "two blocks": (loss(block), shapes(square | wide, (TOKENS // LENGTH, LENGTH, WIDTH))),
    }


def compiled(fn: Callable[..., Any], shapes: tuple[Any, ...], gpu: str, options: dict[str, Any]) -> Any:
    """A function compiled for a GPU of `GPUS`."""
    replicated = NamedSharding(Mesh(np.array(GPUS[gpu].devices()), "data"), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), shapes)
    with without_cache():
        return jax.jit(fn).lower(*placed).compile(options)


def run(options: argparse.Namespace) -> None:
    """Compiles every program for every GPU asked for, prints a table and writes float8_compiled.json.

    Raises:
      ConfigError: for an unknown GPU, and where JAX's CUDA plugin is not installed.
    """
    gpus = (options.gpu or "h200,a100").split(",")
    if unknown := [gpu for gpu in gpus if gpu not in GPUS]:
        raise ConfigError(f"--gpu={unknown[0]} is not known; use {' or '.join(GPUS)}")
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise ConfigError("JAX's CUDA plugin is not here; with Python 3.12 or newer, pip install 'jax[cuda13]'")
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")  # the plugin would look for a GPU, and fail where there is no driver
    rows = []
    for gpu in gpus:
        for name in programs():
            for backend in BACKENDS:
                for precision in PRECISIONS:
                    rows.append(_measured(name, precision, gpu, backend))
                    print(tables.compiled(rows)[-1], flush=True)
    print("\n".join(["", *tables.compiled(rows)]))
    print(runs.write(f"float8_{options.name or 'compiled'}", {"versions": environment.versions(), "rows": rows}))


def _measured(name: str, precision: str, gpu: str, backend: str) -> dict[str, Any]:
    """`measure`, or why it does not compile."""
    try:
        return measure(name, precision, gpu, backend)
    except RuntimeError as error:  # XLA's: that a program does not compile is a result
        about = {"program": name, "precision": precision, "gpu": gpu, "backend": backend}
        return about | {"failed": runs.one_line(error)}


def measure(name: str, precision: str, gpu: str, backend: str) -> dict[str, Any]:
    """What the compiled gradient of a program tells."""
    loss, shapes = programs()[name]
    program = compiled(jax.grad(autocast(loss, PRECISIONS[precision])), shapes, gpu, BACKENDS[backend])
    text = program.as_text()
    kernels = hlo.kernels(text)
    products = Counter(product_dtype(kernel) for kernel in kernels if kernel.kind == "matmul")
    return {
        "program": name,
        "precision": precision,
        "gpu": gpu,
        "backend": backend,
        "products": dict(products),
        "cublaslt_float8_calls": text.count('custom_call_target="__cublas$lt$matmul$f8"'),
        "kernels": len(kernels),
        "megabytes": sum(kernel.bytes for kernel in kernels) / 1e6,
        "temp_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
    }


def product_dtype(kernel: hlo.Kernel) -> str:
    """'float8' for a product of float8 arrays, else the dtype of its first operand: 'bf16'."""
    large = [dtype for dtype, shape in kernel.operands if shape]  # scales are single numbers
    return "float8" if all(dtype.startswith("f8") for dtype in large[:2]) else large[0]
