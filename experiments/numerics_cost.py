"""What do the taps cost, and what a look at the numerics at every 100th step?

python -m experiments.numerics_cost --rounds=30

The step of a config by itself, and the step that counts every tensor (in float32, as it does in training on a CPU). The
steps take turns; results are medians over rounds of the ratio of times within one, with a bootstrap interval. Run it on
an idle machine. Prints a table and writes experiments/results/numerics_cost_PLATFORM.json.
"""

import argparse
import os
import statistics
import time

import jax

from experiments.lib import runs
from mixedres._internal import environment
from mixedres.config.flags import parse
from mixedres.train import start
from mixedres.train.builder import build
from mixedres.train.debug import compare

CONFIG = (
    "--config=configs/digits.py:fp16",
    "--config.num_devices=1",
    "--config.batch_size=128",
    "--config.model.name=cifar_resnet20",
)
STEP, PLAIN, COUNTING = "training step, fp16", "forward and backward, fp32", "the same, counting"


def contenders():
    """(experiment, {name: (compiled, its arguments)}, {name: seconds of compiling})."""
    experiment = build(parse(["numerics_cost", *CONFIG]).config)
    state = start.init_state(experiment)
    batch = experiment.shard_batch(
        next(iter(experiment.source.train_batches(experiment.batch_size, seed=0, first_step=0)))
    )
    shadow = compare.in_float32(experiment)
    functions = {
        STEP: (experiment.train_step(), (state, batch)),
        PLAIN: (shadow.loss_and_grads(), (state, batch)),
        COUNTING: (shadow.numerics_step(), (state.variables, batch)),
    }
    made, seconds = {}, {}
    for name, (function, arguments) in functions.items():
        began = time.perf_counter()
        compiled = function.lower(*arguments).compile()
        seconds[name] = time.perf_counter() - began
        made[name] = (compiled, arguments)
    return experiment, made, seconds


def main() -> None:
    """Times them in turns and writes the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    experiment, made, compile_seconds = contenders()
    times: dict[str, list[float]] = {name: [] for name in made}
    for index in range(options.rounds + 2):
        for name, (compiled, arguments) in made.items():
            began = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            if index >= 2:  # the first rounds warm up
                times[name].append(time.perf_counter() - began)
    rows = [
        {"step": COUNTING, "to": baseline, **runs.paired_ratio(times[COUNTING], times[baseline])}
        for baseline in (PLAIN, STEP)
    ]
    print("| step | ms | compiled in s | temporary MB |\n|---|---|---|---|")
    memory = {name: compiled.memory_analysis().temp_size_in_bytes / 1e6 for name, (compiled, _) in made.items()}
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    for name in made:
        print(f"| {name} | {median[name]:.1f} | {compile_seconds[name]:.1f} | {memory[name]:.1f} |")
    for row in rows:
        low, high = row["interval"]
        print(f"{row['step']} / {row['to']}: {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    look = rows[1]
    print(f"every 100th step looked at: {look['ratio']:.2f} % ({look['interval'][0]:.2f} to {look['interval'][1]:.2f})")
    results = {
        "config": list(CONFIG),
        "rounds": options.rounds,
        "load_average": os.getloadavg(),
        "median_ms": median,
        "compile_seconds": compile_seconds,
        "temporary_mb": memory,
        "rows": rows,
        "device": environment.device(experiment.devices),
        "versions": environment.versions(),
    }
    print(runs.write(f"numerics_cost_{experiment.devices[0].platform}", results))


if __name__ == "__main__":
    main()
