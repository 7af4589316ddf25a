"""The command that examines what half precision does to a network, and recommends settings."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mixedres._internal.cli import command_line, console, process
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import read_json

if TYPE_CHECKING:
    from ml_collections import ConfigDict

DESCRIPTION = """\
Examines the numerics of a network: which values and gradients float16 loses, which loss scale it needs, which layers
should stay in float32, and whether bfloat16 is the better choice.

  python -m mixedres.doctor --config=configs/digits.py:fp16
  python -m mixedres.doctor --config=configs/imagenet.py:fp16 --config.batch_size=32 --steps=0,100 --compare=fp16,bf16
  python -m mixedres.doctor --workdir=runs/imagenet-fp16

Real batches go through a training step in float32; a run is not changed. The command writes the report as a page and as
JSON beside the page, and compiled programs for the next start.
exit status: 0; 1: it failed; 2: a mistake in the command, and no report was written
"""


class Options(NamedTuple):
    """Parsed options of the command; `workdir` is None to examine fresh weights, and `steps` ascend."""

    config: ConfigDict
    workdir: pathlib.Path | None
    steps: list[int]
    compare: list[str]
    out: pathlib.Path


def examine_numerics(given: Sequence[str]) -> None:
    """Runs the command with these arguments; raises ConfigError for a mistake in them before anything is written."""
    options = parse(given)
    # Imported here, and JAX and the models later still, so that a mistake in the command need not wait for them.
    from mixedres import checkpoints, train

    if options.workdir is not None:
        for line in checkpoints.RecordedRun(options.workdir).left_to_command_line(options.config):
            console.say(line)
    plan = train.plan(options.config)
    from mixedres.doctor.examination import examine_network, overrides

    report, errors = examine_network(plan, options.workdir, options.steps, options.compare)
    console.show("", *report.to_text(problems_only=True).splitlines())
    flags = overrides(report, options.config)
    if flags:
        console.show("", "To follow the advice, add:", *(f"  {flag}" for flag in flags))
    elif all(row.is_finite for row in report.rows):
        console.show("", "The config needs no change.")
    document = options.out.with_suffix(".json")
    report.to_html(options.out)
    document.write_text(json.dumps(report.to_json(), allow_nan=False), encoding="utf-8")
    if errors is not None:
        page = _errors_page(options.out)
        errors.to_html(page)
        console.show("", "Where float32 and half part", *errors.to_text().splitlines(), f"All operations: {page}")
    console.show("", f"All {len(report.rows)} tensors: {options.out} (to look at), {document}")


def parse(given: Sequence[str]) -> Options:
    """Returns the options in the arguments; raises ConfigError for a mistake in them."""
    parser = command_line.Parser("python -m mixedres.doctor", DESCRIPTION)
    parser.add_argument("--config", metavar="FILE[:PRESET]", help="as for mixedres.main; --config.KEY=VALUE too")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--workdir",
        metavar="RUN",
        help="examine the newest checkpoint of this run, with its config unless --config is given",
    )
    where.add_argument("--init", action="store_true", help="examine a fresh network (the default)")
    parser.add_argument(
        "--steps", default="0", metavar="N,N...", help="training steps after which to examine (default 0)"
    )
    parser.add_argument(
        "--compare",
        default="",
        metavar="PRESET,...",
        help="measure the errors of real gradients in these presets, and where they begin in the first",
    )
    parser.add_argument("--out", default="doctor.html", metavar="FILE.html", help="the report (default doctor.html)")
    options, rest = parser.parse_known_args(list(given))
    wrong = [argument for argument in rest if not argument.startswith("--config.")]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is unknown; --help lists what there is")
    out = command_line.path(options.out)
    if out.suffix != ".html":
        raise ConfigError(f"--out={options.out} must end in .html")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out={options.out}: there is no directory {out.absolute().parent}; make it first")
    _check_free(out)
    if options.workdir == "":
        raise ConfigError("--workdir= is empty; name the directory of a run")
    workdir = None if options.workdir is None else command_line.path(options.workdir)
    config, steps = _config(options, rest, workdir), _steps(options.steps)
    presets = [name.strip() for name in options.compare.split(",") if name.strip()]
    return Options(config, workdir, steps, command_line.presets("--compare", presets), out)


def _config(options: argparse.Namespace, rest: list[str], workdir: pathlib.Path | None) -> ConfigDict:
    from mixedres.checkpoints import RecordedRun
    from mixedres.config import config_of_run, parse_flags

    if options.config:
        file = options.config
    elif workdir is not None:
        file = config_of_run(workdir)
    else:
        raise ConfigError("--config is missing; try --config=configs/digits.py:fp16, or --workdir=RUN for a run")
    return parse_flags([f"--config={file}", *rest], RecordedRun.read_portable_config).config


def _errors_page(out: pathlib.Path) -> pathlib.Path:
    """Returns the page about the errors of all operations, beside the report."""
    return out.with_name(f"{out.stem}_compare.html")


def _check_free(out: pathlib.Path) -> None:
    """Raises ConfigError if `out` or the JSON beside it exists and is not an earlier report."""
    document = out.with_suffix(".json")
    earlier = read_json(document)
    is_report = isinstance(earlier, dict) and {"advice", "recommended_log2_scale", "rows"} <= earlier.keys()
    for path in (out, document, _errors_page(out)):
        if path.exists() and not (is_report and path.is_file()):
            raise ConfigError(f"--out={out}: {path} exists and is not an earlier report; name another file")


def _steps(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--steps={text} must be numbers of training steps, such as 0,100,1000")
    return sorted(set(map(int, parts)))


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status, which `DESCRIPTION` explains."""
    return command_line.run("mixedres.doctor", examine_numerics, argv[1:], smaller="a smaller --config.batch_size")


if __name__ == "__main__":
    process.start(main)
