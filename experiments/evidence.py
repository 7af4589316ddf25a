"""Is half precision as accurate, to a tenth of a point? Paired intervals of a sweep on cluttered digits.

python -m experiments.evidence runs/sweeps/cluttered

Evaluates every finished run image by image, and compares each case with the baseline of the sweep seed by seed and
image by image: test top-1 and, with more power, the mean test cross-entropy. The intervals are 95 % ones for other
seeds and other digits: the draws of one digit are a cluster. The floor is what a run of the baseline changes by where
only its order of summation does: 95 % of single runs lie within. Both runs of the baseline are what the other cases are
compared with: their mean, seed by seed. A case costs nothing where its interval lies within the floor. --doctor also
tells what the doctor says of the case that must fail, from the gradients of float32.

Prints a table and writes experiments/results/evidence_NAME.json, .png and a picture of 64 images (NAME from --name,
default cluttered).
"""

import argparse
import math
import pathlib
import statistics
import sys
from typing import Any

import numpy as np

from experiments.lib import clusters, comparison, outcomes, plots, runs
from experiments.lib.comparison import Results, Variant
from mixedres._internal.errors import ConfigError
from mixedres.config import recorded, unflatten
from mixedres.data.datasets import cluttered_digits
from mixedres.data.datasets.cluttered_digits import DRAWS
from mixedres.doctor.examine import examine

# Figures: name, what an image's value is multiplied by, decimals.
FIGURES = {"top1": (100.0, 2), "loss": (1.0, 4)}


def label(variant: Variant, baseline: Variant) -> str:
    """'fp16', with what else differs from the baseline."""
    other = {k: v for k, v in variant.overrides.items() if k != "preset" and baseline.overrides.get(k) != v}
    scale = other.pop("precision.loss_scale", None)
    parts = [variant.overrides["preset"]]
    if "num_devices" in other:
        parts.append(f"on {other.pop('num_devices')} devices")
        other.pop("batch_norm.sync", None)
    if scale is not None:
        parts.append(f"loss scale 2^{math.log2(scale):g}")
    return ", ".join([*parts, *(f"{key}={value}" for key, value in other.items())])


def is_floor(variant: Variant, baseline: Variant) -> bool:
    """Whether a variant computes what the baseline does in another order."""
    same = variant.overrides["preset"] == baseline.overrides["preset"]
    return same and variant is not baseline and "num_devices" in variant.overrides


def rows(results: Results) -> list[dict[str, Any]]:
    """A row a case: means, and differences to the baseline, or to the mean of both its orders, with their intervals.

    Raises:
      ConfigError: for a sweep without its baseline, or on data that does not come in clusters.
    """
    by_baseline = next((v for v in results.variants if v.overrides == results.baseline), None)
    if by_baseline is None:
        raise ConfigError("no run of the sweep's baseline is finished; start experiments.sweep again")
    found: list[dict[str, Any]] = []
    outcomes_of = {variant.name: _outcomes(variant) for variant in results.variants}
    floors = [outcomes_of[variant.name] for variant in results.variants if is_floor(variant, by_baseline)]
    for variant in results.variants:
        own, other_order = outcomes_of[variant.name], is_floor(variant, by_baseline)
        # The baseline in another order of summation is compared with the baseline alone.
        references = [outcomes_of[by_baseline.name], *([] if other_order else floors)]
        pairs = [seed for seed in own if all(seed in one for one in references) and variant is not by_baseline]
        row: dict[str, Any] = {"case": label(variant, by_baseline), "n": len(own), "pairs": len(pairs)}
        row["is_floor"] = other_order
        row["loss_scale"] = variant.overrides.get("precision.loss_scale")
        row["skipped_steps"] = int(sum(variant.values("skipped_steps").values()))
        for figure, (factor, _) in FIGURES.items():
            means = [factor * float(one[figure].mean()) for one in own.values()]
            row[figure] = {"mean": statistics.fmean(means), "sd": statistics.stdev(means) if len(means) > 1 else 0.0}
            if pairs:
                values = [own[seed][figure] - np.mean([one[seed][figure] for one in references], 0) for seed in pairs]
                change = clusters.difference(factor * np.stack(values), DRAWS)
                row[figure] |= {"mean_difference": change.mean, "interval": change.interval}
                row[figure] |= {"single": change.single, "width": change.width}
        found.append(row)
    _judge(found)
    return found


def _outcomes(variant: Variant) -> dict[Any, dict[str, np.ndarray]]:
    found = {}
    for seed, directory in variant.directories.items():
        found[seed] = outcomes.outcomes(directory)
        print(f"{directory.name}: {found[seed]['top1'].mean():.2%}", flush=True)
    return found


def _judge(found: list[dict[str, Any]]) -> None:
    """Adds whether each case lies within the floor: True, False, or None where one of them is not known."""
    floor = next((row for row in found if row["is_floor"]), None)
    for row in found:
        for figure in FIGURES:
            interval, single = row[figure].get("interval"), floor and floor[figure].get("single")
            within = bool(single and interval and single[0] <= interval[0] and interval[1] <= single[1])
            row[figure]["within_floor"] = within if single and interval and row is not floor else None


def predicted(run: pathlib.Path, scale: float) -> dict[str, Any]:
    """What the doctor says of a loss scale, from the gradients of a run's network after 0, 200 and 600 steps."""
    config = unflatten(recorded.read(run) or {})
    config.precision.name, config.precision.loss_scale = "fp16_static", scale
    report = examine(config, None, (0, 200, 600), ())
    log2_scale = round(math.log2(scale))
    lost = [row.lost(log2_scale) for row in report.scaled]
    return {
        "log2_scale": log2_scale,
        "min_sufficient_log2_scale": report.min_sufficient_log2_scale,
        "recommended_log2_scale": report.recommended_log2_scale,
        "median_lost": statistics.median(lost),
        "most_lost": max(lost),
        "gradients_that_lose_over_a_tenth": sum(share > 0.1 for share in lost),
        "gradients": len(lost),
    }


def table(found: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| case | seeds | test top-1 | difference (95 % interval), points | test cross-entropy | difference (95 % "
        "interval) | within the floor: top-1, cross-entropy |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in found:
        cells = [f"`{row['case']}`", str(row["n"])]
        for figure, (_, decimals) in FIGURES.items():
            one = row[figure]
            cells.append(f"{one['mean']:.{decimals}f} ± {one['sd']:.{decimals}f}")
            cells.append(difference(one, decimals))
        verdicts = [row[figure]["within_floor"] for figure in FIGURES]
        told = ", ".join({True: "yes", False: "no", None: "-"}[verdict] for verdict in verdicts)
        cells.append("is the floor" if row["is_floor"] else "" if verdicts == [None, None] else told)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def difference(one: dict[str, Any], decimals: int) -> str:
    """The difference of a figure of a row and its interval: '-0.06 (-0.20 to +0.09)'; '' for the baseline."""
    if "mean_difference" not in one:
        return ""
    told = signed(one["mean_difference"], decimals)
    return f"{told} ({' to '.join(signed(end, decimals) for end in one['interval'])})" if one["interval"] else told


def signed(value: float, decimals: int) -> str:
    """A number with its sign, and no '-0.00'."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"


def main(argv: list[str]) -> int:
    """Evaluates, compares, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=pathlib.Path, help="the --out of experiments.sweep")
    parser.add_argument("--name", default="cluttered", help="of the files of results (default cluttered)")
    parser.add_argument("--doctor", action="store_true", help="ask the doctor about the smallest loss scale, too")
    options = parser.parse_args(argv)
    try:
        results = comparison.read(options.directory)
        found = rows(results)
        scales = [row["loss_scale"] for row in found if row["loss_scale"]]
        run = next(iter(results.variants[0].directories.values()))
        said = predicted(run, min(scales)) if options.doctor and scales else None
        whole = comparison.document(results)
    except ConfigError as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2
    kept = ("question", "sweep", "model", "data", "date", "processor", "device", "versions", "notes")
    document = {name: whole[name] for name in kept} | {"draws": DRAWS, "rows": found, "doctor": said}
    document["seconds"] = {v.name: v.mean("seconds") for v in results.variants}
    path = runs.write(f"evidence_{options.name}", document)
    plots.save(plots.evidence(found, results.question), path)
    source = cluttered_digits.load()
    batch = next(source.train_batches(64, seed=0))
    title = "the first 64 training images of cluttered digits, seed 0"
    plots.save(plots.samples(batch["image"], batch["label"], title), path.with_name(f"{path.stem}_samples.png"))
    print("\n".join(["", *table(found), "", *([f"doctor: {said}"] if said else []), str(path)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
