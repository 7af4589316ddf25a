"""How fast is each preset? A config on synthetic data, one preset after the other, each in its own process.

python -m experiments.preset_speed --config=configs/imagenet.py --presets=fp32,tf32,bf16,fp16,fp16_static --steps=100

Further arguments go to every run, such as --config.model.name=resnet18. Prints a table and writes
experiments/results/preset_speed_NAME.json (NAME from --name, else the device): images per second, step time, peak
device memory, and the ratio to fp32 and to tf32. fp32 is true float32; tf32 is what JAX calls float32 on recent GPUs
unless told otherwise.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

from experiments import runs


def main() -> None:
    """Runs the presets in turn and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/imagenet.py", help="config file, without a preset")
    parser.add_argument("--presets", default="fp32,tf32,bf16,fp16,fp16_static")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--name", default="")
    options, rest = parser.parse_known_args()

    rows, some = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for preset in options.presets.split(","):
            arguments = [
                f"--config={options.config}:{preset}",
                "--config.data.name=synthetic",
                f"--config.steps={options.steps}",
                "--config.eval_every=0",
                *rest,
            ]
            some = runs.run(arguments, pathlib.Path(scratch) / preset)
            names = ("examples_per_second", "step_time_ms", "compile_seconds")
            row = {"preset": preset} | {name: some["train"][name] for name in names} | some["memory"]
            rows.append(row)
            print(f"{preset}: {row['examples_per_second']:,.0f} images/s", flush=True)

    rates = {row["preset"]: row["examples_per_second"] for row in rows}
    print("\n| preset | images/s | step ms | peak device MB | to fp32 | to tf32 |\n|---|---|---|---|---|---|")
    for row in rows:
        for other in ("fp32", "tf32"):
            row[f"ratio_to_{other}"] = row["examples_per_second"] / rates[other] if other in rates else None
        peak = row["device_peak_bytes"]
        ratios = [row[f"ratio_to_{other}"] for other in ("fp32", "tf32")]
        cells = [f"{peak / 1e6:,.0f}" if peak else "-", *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)]
        print(
            f"| {row['preset']} | {row['examples_per_second']:,.0f} | {row['step_time_ms']:.1f} | {' | '.join(cells)} |"
        )
    name = options.name or some["device"]["kind"].lower().replace(" ", "_")
    results = {"device": some["device"], "versions": some["versions"], "model": some["model"], "rows": rows}
    print(runs.write(f"preset_speed_{name}", results))


if __name__ == "__main__":
    main()
