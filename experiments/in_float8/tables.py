"""The lines of the Markdown tables of the parts, which need none of their libraries."""

import statistics
from typing import Any


def gradients(rows: list[dict[str, Any]]) -> list[str]:
    """Of the part gradients: errors of loss and gradient."""
    lines = [
        "| network | library | variant | products in float8 | gradient error, % | loss error, % |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        for index, (name, one) in enumerate(row["variants"].items()):
            heads = ["", ""] if index else [row["network"], row["library"]]
            errors = [_percent(one["gradient_error"]), _percent(one["loss_error"])]
            products = "{float8}/{products}".format(**one)
            lines.append(f"| {' | '.join([*heads, name, products, *errors])} |")
    return lines


def _percent(values: list[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.3g}{deviation}"


def training(tasks: dict[str, Any]) -> list[str]:
    """Of the part training: the last losses."""
    lines = [
        "| task | precision | training loss | difference to fp32 | validation loss | difference to fp32 "
        "| accuracy | difference to fp32 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, task in tasks.items():
        base = next(iter(task["runs"].values()))
        for precision, made in task["runs"].items():
            cells = [name, precision]
            for what in ("train_loss", "validation_loss", "validation_accuracy"):
                there = what in made[0]["last"]
                cells.append(cell(made, what) if there else "")
                cells.append(cell(made, what, base) if there and made is not base else "")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def cell(made: list[dict[str, Any]], what: str, base: list[dict[str, Any]] | None = None) -> str:
    """Mean and deviation of a last figure, or of its differences to other runs of the same seeds."""
    values = [run["last"][what] for run in made]
    if base is not None:
        values = [value - run["last"][what] for value, run in zip(values, base, strict=True)]
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'' if base is None else '+'}.4f}{deviation}"


def compiled(rows: list[dict[str, Any]]) -> list[str]:
    """Of the part compiled: products, kernels, bytes."""
    lines = [
        "| program | GPU | products by | precision | products | cuBLASLt float8 calls | kernels | moved | temporary |",
        "|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "failed" in row:
            cells = [row["program"], row["gpu"], row["backend"], f"`{row['precision']}`", row["failed"]]
            lines.append(f"| {' | '.join(cells)} | | | | |")
            continue
        products = ", ".join(f"{count} {dtype}" for dtype, count in sorted(row["products"].items()))
        cells = [row["program"], row["gpu"], row["backend"], f"`{row['precision']}`", products]
        cells += [str(row["cublaslt_float8_calls"]), str(row["kernels"])]
        cells += [f"{row['megabytes']:,.0f} MB", f"{row['temp_mb']:,.0f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
