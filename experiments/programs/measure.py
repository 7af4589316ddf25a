"""Bytes, memory and kernels of the programs' training steps, compiled for a GPU, and gradient errors on the CPU."""

import functools
import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.lib import hlo, runs
from experiments.lib.gpus import GPUS, absent_device
from experiments.programs import steps
from mixedres._internal.mesh import make_mesh
from mixedres._internal.types import Array, DType, PyTree

SEEDS = 5
SCALE = 2.0**12  # of the loss, so that float16 holds its gradients
# What is compared, in words.
NAMES = {"gb": "bytes", "temp_gb": "temporary memory", "kernels": "kernels", "error": "gradient error"}
# {program: {what is compared: the most that autocast / own may be}}
LIMITS = pathlib.Path(__file__).parent / "limits.json"


def compiled(name: str, mode: str, half: DType, gpu: str) -> Any:
    """Returns the compiled training step of a program; parameters and optimizer state are donated."""
    program = steps.PROGRAMS[name]
    params, inputs = program.shapes()
    train, tx = steps.step(program.loss_fn(mode, half))
    devices = GPUS[gpu].devices(program.devices)
    mesh = make_mesh(devices)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))

    def shared(x: jax.ShapeDtypeStruct) -> NamedSharding:
        """Returns the sharding of the largest axis that the devices can share."""
        axes = [axis for axis, size in enumerate(x.shape) if size % len(devices) == 0]
        axis = max(axes, key=lambda axis: x.shape[axis], default=-1)
        return NamedSharding(mesh, PartitionSpec(*(mesh.axis_names[0] if axis == i else None for i in range(x.ndim))))

    def placed(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        one = SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one if len(devices) == 1 else sharding)

    state = jax.tree.map(lambda x: placed(x, shared(x)), (params, jax.eval_shape(tx.init, params)))
    batch = [placed(x, rows) for x in inputs]
    with absent_device():
        lowered = jax.jit(train, donate_argnums=(0, 1)).trace(*state, *batch).lower(lowering_platforms=("cuda",))
        return lowered.compile()


@functools.cache
def facts(name: str, mode: str, half: DType, gpu: str) -> dict[str, Any]:
    """Returns GB moved, GB of temporary memory and kernels of a program's step, for each device."""
    step = compiled(name, mode, half, gpu)
    kernels = [kernel for kernel in hlo.kernels(step.as_text()) if kernel.kind != "collective"]
    temporary = step.memory_analysis().temp_size_in_bytes
    return {"gb": sum(k.bytes for k in kernels) / 1e9, "temp_gb": temporary / 1e9, "kernels": len(kernels)}


def errors(name: str, half: DType) -> dict[str, float]:
    """Returns the mean distance of the gradients to float32's, in norms of float32's, at the sizes for a CPU."""
    program = steps.PROGRAMS[name]
    _, shapes = program.shapes(small=True)
    network = program.network(jnp.float32, **program.small.network)
    gradients = {mode: jax.jit(jax.grad(_scaled(program, mode, half))) for mode in steps.MODES}
    found: dict[str, list[float]] = {mode: [] for mode in steps.MODES[1:]}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        inputs = [_values(rng, x, program.most) for x in shapes]
        params = _moved(rng, network.init(jax.random.key(seed), *inputs))
        exact = gradients["float32"](params, *inputs)
        for mode, distances in found.items():
            distances.append(_distance(gradients[mode](params, *inputs), exact))
    return {mode: statistics.fmean(distances) for mode, distances in found.items()}


def _scaled(program: steps.Program, mode: str, half: DType) -> Any:
    loss = program.loss_fn(mode, half, small=True)
    return lambda *args: SCALE * loss(*args)


def _values(rng: np.random.Generator, x: jax.ShapeDtypeStruct, most: int) -> Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, most, x.shape), x.dtype)
    return jnp.asarray(rng.standard_normal(x.shape), x.dtype)


def _moved(rng: np.random.Generator, params: PyTree) -> Any:
    """Returns parameters away from their first values, of which many are zero or one."""
    return jax.tree.map(lambda x: x * (1 + 0.1 * rng.standard_normal(x.shape).astype(x.dtype)) + 0.02, params)


def _distance(found: PyTree, exact: PyTree) -> float:
    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, found, exact)
    norm, of = (sum(float(jnp.square(x).sum()) for x in jax.tree.leaves(tree)) for tree in (difference, exact))
    return float(np.sqrt(norm / of))


def row(name: str, half: str, gpu: str, *, whole: bool = True) -> dict[str, Any]:
    """Returns what the program is like in every mode, and the ratios of autocast to the library's own half mode.

    Without `whole`, without float32 and the errors of gradients.
    """
    modes = steps.MODES if whole else steps.MODES[1:]
    found = {mode: dict(facts(name, mode, mode if mode == "float32" else half, gpu)) for mode in modes}
    try:
        for mode, error in errors(name, half).items() if whole else ():
            found[mode]["error"] = error
    except ValueError as error:  # CPUs lack float16 products that jax.nn.dot_product_attention asks for
        if "on CPU" not in str(error):
            raise
    ratios = {key: found["autocast"][key] / found["own"][key] for key in found["own"]}
    return {"program": name, "dtype": half, "gpu": gpu, **found, "ratios": ratios}


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    head = ["program", "GB, own", *NAMES.values()]
    lines = []
    for one in rows:
        ratios = [f"{one['ratios'][key]:.2f}" if key in one["ratios"] else "" for key in NAMES]
        lines.append([one["program"], f"{one['own']['gb']:.0f}", *ratios])
    return runs.markdown(head, lines)


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the medians and the largest ratios, in one sentence."""
    parts = []
    for key, name in NAMES.items():
        ratios = {one["program"]: one["ratios"][key] for one in rows if key in one["ratios"]}
        worst = max(ratios, key=ratios.__getitem__)
        parts.append(f"{name} {statistics.median(ratios.values()):.2f}, at most {ratios[worst]:.2f} ({worst})")
    return f"Autocast / own, medians: {'; '.join(parts)}"


def limits() -> dict[str, dict[str, float]]:
    """Returns the committed limits."""
    return dict(json.loads(LIMITS.read_text()))


def passed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns a line for every ratio that is above the limit of its program."""
    most = limits()
    return [
        f"{one['program']}, {one['dtype']}: {NAMES[key]}, autocast / own, is {one['ratios'][key]:.3f}, may be {limit:g}"
        for one in rows
        for key, limit in most[one["program"]].items()
        if key in one["ratios"] and not one["ratios"][key] <= limit
    ]
