"""How long does a checkpoint take, and how long does the training loop stand still for it?

python -m experiments.checkpoint_stall --saves=10

The state of ResNet-50 with SGD (parameters and momentum, float32), and the same with a moving average, saved again and
again by `mixedres.checkpoints.manager`, as in the loop. Stall: seconds within `save` and `poll`. Time: from the call
until the checkpoint has its name. The fraction is that of an interval of 100 steps of 0.5 s. Writes
experiments/results/checkpoint_stall.json.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

from configs import imagenet
from experiments.lib import runs
from mixedres._internal import environment
from mixedres.checkpoints.manager import Checkpoints
from mixedres.train.builder import build

INTERVAL = 100 * 0.5


def measure(ema_decay: float, saves: int) -> dict[str, Any]:
    """Sizes in bytes and seconds, medians over `saves` and the largest."""
    config = imagenet.get_config(f"fp16,recipe=cosine,ema_decay={ema_decay},data.name=synthetic")
    state = jax.jit(build(config).init_state)()
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    stalls, times = [], []
    with tempfile.TemporaryDirectory() as directory:
        saved = Checkpoints(pathlib.Path(directory) / "checkpoints", keep=2)
        for step in range(1, saves + 1):
            state = jax.block_until_ready(change(state))  # as a step does: the old memory is used again
            started = time.perf_counter()
            saved.save(step, state, {"devices": 1})
            stall = time.perf_counter() - started
            while not (saved.directory / str(step)).exists():
                time.sleep(0.01)
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
            assert saved.poll() == []
            stalls.append(stall + time.perf_counter() - started)
        size = sum(path.stat().st_size for path in (saved.directory / str(saves)).rglob("*") if path.is_file())
        saved.close()
    return {
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "params_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
        "checkpoint_bytes": size,
        "stall_seconds": {"median": statistics.median(stalls), "max": max(stalls)},
        "stall_share": statistics.median(stalls) / INTERVAL,
        "seconds": {"median": statistics.median(times), "max": max(times)},
    }


def main() -> None:
    """Measures both states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10, help="checkpoints of each state")
    saves = parser.parse_args().saves
    results = {name: measure(decay, saves) for name, decay in (("sgd", 0.0), ("sgd and moving average", 0.9999))}
    for name, found in results.items():
        print(
            f"{name}: {found['state_bytes'] / 1e6:.0f} MB; the loop stands still for "
            f"{found['stall_seconds']['median']:.2f} s ({found['stall_share']:.2%} of the interval), "
            f"whole after {found['seconds']['median']:.2f} s"
        )
    print(runs.write("checkpoint_stall", {"versions": environment.versions(), "states": results}))


if __name__ == "__main__":
    main()
