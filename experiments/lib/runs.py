"""What experiments share: a run of the command line in its own process, and results with their command and date."""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mixedres._internal import environment
from mixedres._internal.errors import ConfigError

# A command that runs others gathers their results elsewhere.
RESULTS = pathlib.Path(os.environ.get("EXPERIMENTS_RESULTS") or pathlib.Path(__file__).parents[1] / "results")
ROOT = pathlib.Path(__file__).parents[2]


def run(arguments: list[str], workdir: pathlib.Path) -> dict[str, Any]:
    """Runs ``python -m mixedres.main`` with `arguments` in a fresh process and workdir; returns its summary."""
    command = [sys.executable, "-m", "mixedres.main", *arguments, f"--workdir={workdir}", "--clean"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((workdir / "summary.json").read_text())


def newest_step(workdir: pathlib.Path) -> int:
    """Returns the step of the last whole line of metrics, read from the file's end; 0 if there is none."""
    size = 2**12
    with contextlib.suppress(OSError), (workdir / "metrics.jsonl").open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(end - size, 0))
            whole = file.read(min(size, end)).split(b"\n")[:-1]  # what follows the last line break is not whole
            for line in reversed(whole[size < end :]):  # the first line of a part lacks its begin
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["step"])
            if size >= end:
                return 0
            size *= 8
    return 0


def write(name: str, results: dict[str, Any]) -> pathlib.Path:
    """Writes `results` with the command, the date and the processor to ``experiments/results/NAME.json``.

    `results` can name a date and a processor of its own, where they are older than the file.
    """
    path = RESULTS / f"{name}.json"
    header = {"command": command(), "date": datetime.date.today().isoformat(), "processor": environment.processor()}
    header["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    path.write_text(json.dumps(header | results, indent=2) + "\n")
    return path


def commit(checkout: pathlib.Path = ROOT) -> str:
    """Returns the hash of the newest commit in a checkout's folder; '' without Git."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%H", "--", "."]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
    return f"{type(error).__name__}: {reason}"


def names(option: str, given: str) -> list[str]:
    """What a comma-separated option lists; raises ConfigError if nothing stands between two commas, or a name twice."""
    found = given.split(",")
    if "" in found or len(set(found)) < len(found):
        raise ConfigError(f"--{option}={given} must name each of one or more once, with commas between them")
    return found


def numbers(option: str, given: str) -> list[int]:
    """Returns the numbers of a comma-separated option; raises ConfigError if one is none or not above 0."""
    if not all(size.isdecimal() and int(size) > 0 for size in given.split(",")):
        raise ConfigError(f"--{option}={given} is not a list of numbers > 0; write such as --{option}=256,32")
    return [int(size) for size in given.split(",")]


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for an option that is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value} must be >= 1")


def check_rest(command: str, rest: Sequence[str]) -> None:
    """Raises ConfigError for an argument that neither the command nor a config has."""
    for argument in rest:
        if not argument.startswith("--config."):
            raise ConfigError(f"{argument!r} is no option of {command}; --help lists them")


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m experiments.COMMAND``."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        f"python -m experiments.{command}", description=description, formatter_class=formatter
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """Returns the lines of a Markdown table; the first `texts` columns are texts, the others numbers."""
    rule = "".join(["|---"] * texts + ["|---:"] * (len(head) - texts))
    return [f"| {' | '.join(head)} |", f"{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def slug(kind: str) -> str:
    """Returns 'nvidia_h200' of 'NVIDIA H200'."""
    return re.sub(r"\W+", "_", kind.lower()).strip("_")


def program_bytes(compiled: Any) -> int:
    """Device memory of a compiled program: arguments, results and temporary arrays, aliased ones once."""
    memory = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return needed - memory.alias_size_in_bytes


def command() -> str:
    """The command line of this process, without the directories of this machine."""
    arguments = [re.sub(r"(^|=)/\S*/(?=[^/])", r"\1.../", argument) for argument in sys.argv[1:]]
    return " ".join([f"python -m experiments.{pathlib.Path(sys.argv[0]).stem}", *arguments])


def config_flag(config: str, preset: str) -> str:
    """--config=FILE:PRESET,key=value for 'FILE,key=value'."""
    file, comma, rest = config.partition(",")
    return f"--config={file}:{preset}{comma}{rest}"
