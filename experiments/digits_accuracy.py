"""Does half precision cost accuracy? The digits in several presets and seeds.

python -m experiments.digits_accuracy --presets=fp32,bf16,fp16 --seeds=5

Prints a table and writes experiments/results/digits_accuracy.json: test top-1 of every run, mean and standard
deviation per preset, and the mean difference to the first preset, seed by seed. Half a minute a run on two CPU cores.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile

from experiments import runs


def main() -> None:
    """Runs every preset with every seed and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="fp32,bf16,fp16", help="comma-separated; the first is the baseline")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    presets = options.presets.split(",")

    summaries: dict[str, list[dict]] = {preset: [] for preset in presets}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            for preset in presets:
                arguments = [f"--config=configs/digits.py:{preset}", f"--config.seed={seed}"]
                summary = runs.run(arguments, pathlib.Path(scratch) / f"{preset}-{seed}")
                summaries[preset].append(summary)
                print(f"{preset} seed {seed}: {100 * summary['eval']['top1']:.2f} %", flush=True)

    baseline = [summary["eval"]["top1"] for summary in summaries[presets[0]]]
    rows = [row(preset, summaries[preset], baseline) for preset in presets]
    print("\n".join(["", *table(rows)]))
    some = summaries[presets[0]][0]
    print(runs.write("digits_accuracy", {"device": some["device"], "versions": some["versions"], "rows": rows}))


def row(preset: str, summaries: list[dict], baseline: list[float]) -> dict:
    """A preset's line, in per cent and points."""
    top1 = [100 * summary["eval"]["top1"] for summary in summaries]
    return {
        "preset": preset,
        "top1": top1,
        "mean_top1": statistics.mean(top1),
        "std_top1": statistics.stdev(top1) if len(top1) > 1 else 0.0,
        "mean_difference": statistics.mean(a - 100 * b for a, b in zip(top1, baseline, strict=True)),
        "skipped_steps": sum(summary["loss_scale"]["skipped_steps"] for summary in summaries),
        "step_time_ms": statistics.median(summary["train"]["step_time_ms"] for summary in summaries),
    }


def table(rows: list[dict]) -> list[str]:
    """The lines of the Markdown table, as the README has it."""
    lines = [
        f"| preset | test top-1, n={len(rows[0]['top1'])} seeds | difference to {rows[0]['preset']} | skipped steps |",
        "|---|---|---|---|",
    ]
    for r in rows:
        spread = f"{r['mean_top1']:.2f} ± {r['std_top1']:.2f} %"
        difference = round(r["mean_difference"], 2) + 0.0  # no "-0.00"
        lines.append(f"| `{r['preset']}` | {spread} | {difference:+.2f} points | {r['skipped_steps']} |")
    return lines


if __name__ == "__main__":
    main()
