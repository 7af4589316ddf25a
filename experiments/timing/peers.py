"""Our time beside PyTorch's on a processor, from the files that `experiments.benchmark --versus` wrote."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.lib import runs

PYTORCH = ("PyTorch, eager", "PyTorch, compiled")
DTYPES = ("fp32", "bf16")


def passes(result: Mapping[str, Any], networks: Mapping[str, str], processor: str) -> list[dict[str, Any]]:
    """Returns a row a pass and dtype: ours, and our time over that of PyTorch's faster form.

    Other dtypes than `DTYPES`, and passes in which PyTorch took no part, have no row.

    Args:
        result: of a file.
        networks: names of models; others keep their own.
        processor: its name.
    """
    found = []
    same = ("model", "image_size", "batch_size", "pass", "dtype")
    for _, group in itertools.groupby(result["rows"], lambda row: [row[name] for name in same]):
        own, *others = group
        rivals = [row for row in others if row["contender"] in PYTORCH]
        if own["dtype"] not in DTYPES or not rivals:
            continue
        best = min(rivals, key=lambda row: row["step_ms"])
        network = networks.get(own["model"], own["model"])
        name = f"{network}, {own['batch_size']} of {own['image_size']} px"
        ratios = {"ratio": best["ours_to_this"], "cpu_ratio": best["ours_to_this_cpu"]}
        found.append({**own, "name": name, "processor": processor, **ratios})
    return found


def ranges(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the ratios of training on one processor, from the smallest to the largest of each dtype."""
    training = [row for row in rows if row["pass"] == "training"]
    found = ((dtype, [row["ratio"]["ratio"] for row in training if row["dtype"] == dtype]) for dtype in DTYPES)
    return ", ".join(f"{dtype} {min(ratios):.2f} to {max(ratios):.2f}" for dtype, ratios in found if ratios)


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table of one processor: for each dtype the ratio of times."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        name = row["name"] if row["pass"] == "training" else f"{row['name']}, {row['pass']}"
        found.setdefault(name, {})[row["dtype"]] = f"{row['ratio']['ratio']:.2f} ({row['cpu_ratio']['ratio']:.2f})"
    head = ["network, images", *(f"{dtype} (CPU time)" for dtype in DTYPES)]
    return runs.markdown(head, [[name, *(of.get(dtype, "") for dtype in DTYPES)] for name, of in found.items()])
