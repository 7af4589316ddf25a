"""Fuzzing: hostile files of every format that a command reads must end it in one line, within seconds and 2 GB.

python -m experiments.fuzz
python -m experiments.fuzz --minutes=30
python -m experiments.fuzz --formats=png,config --mutations=10000 --seed=7 --out=failures

Small intact files are made, and mutated: bytes of all, and the inside of each format with its checksums and lengths
right around it. Every mutant goes to what a command calls on such a file, in one of two processes that end alone. It
must be accepted, or refused with a line for a person. A traceback, a second line, a control character, a printed
warning, a signal, more than 10 s, or more than 2 GB of address space (beyond what the imports take where they include
JAX) is a failure. A mutant is a function of the seed, the format, its number and, in formats of a run, the run; inputs
that fail are kept in --out, each with its report. Prints a line for every round of a format and a table at the end.

exit status: 0; 1: something failed
"""

import argparse
import concurrent.futures
import functools
import itertools
import pathlib
import tempfile
import time
from collections.abc import Sequence

from experiments.fuzzing import campaign
from experiments.fuzzing.formats import FORMATS
from mixedres._internal import command_line, process
from mixedres._internal.errors import ConfigError, MixedresError

# Workers at a time.
WORKERS = 2


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options; raises ConfigError for a mistake."""
    parser = command_line.Parser("python -m experiments.fuzz", __doc__)
    parser.add_argument("--minutes", type=float, help="go on in rounds for so long (default: one round)")
    parser.add_argument("--mutations", type=int, default=2000, help="of each format in a round (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default 0)")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"some of {','.join(FORMATS)} (default all)")
    parser.add_argument(
        "--out", type=command_line.path, default=pathlib.Path("fuzz-failures"), help="for inputs that fail"
    )
    options = parser.parse_args(given)
    options.formats = list(dict.fromkeys(options.formats.split(",")))
    for name in options.formats:
        if name not in FORMATS:
            raise ConfigError(f"--formats: {name!r} is unknown; use some of {','.join(FORMATS)}")
    if options.mutations < 1 or options.seed < 0 or (options.minutes is not None and not options.minutes > 0):
        raise ConfigError("--mutations must be at least 1, --seed at least 0 and --minutes more than 0")
    return options


def fuzz(given: Sequence[str]) -> None:
    """Runs the command; raises MixedresError where something failed."""
    options = parse(given)
    begun = time.monotonic()
    until = float("inf") if options.minutes is None else begun + 60 * options.minutes
    rounds = itertools.count() if options.minutes else range(1)
    tallies = {name: campaign.Tally(name) for name in options.formats}
    with tempfile.TemporaryDirectory(prefix="mixedres-fuzz-") as place:
        corpus = pathlib.Path(place) / "corpus"
        campaign.make_corpus(corpus)
        once = functools.partial(_once, corpus=corpus, options=options, until=until)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for number in rounds:
                if time.monotonic() >= until:
                    break
                for tally in pool.map(functools.partial(once, number=number), options.formats):
                    tallies[tally.name] += tally
                    print(_progress(number, tally), flush=True)
    print("\n".join(table(list(tallies.values()))))
    for tally in tallies.values():
        for signature, numbers in tally.failures.items():
            print(f"{tally.name}: {signature}: {len(numbers)} mutants, first {numbers[0]}")
    failed = sum(tally.failed for tally in tallies.values())
    if failed:
        raise MixedresError(f"{failed} mutants failed; {options.out} has their files and reports")


def _once(name: str, *, number: int, corpus: pathlib.Path, options: argparse.Namespace, until: float) -> campaign.Tally:
    numbers = range(number * options.mutations, (number + 1) * options.mutations)
    return campaign.fuzz(name, corpus, numbers, seed=options.seed, until=until, kept=options.out)


def _progress(number: int, tally: campaign.Tally) -> str:
    rest = ", the rest left out" if tally.incomplete else ""
    return (
        f"round {number + 1}, {tally.name}: {tally.mutations} mutants, {tally.failed} failed{rest}; "
        f"{tally.cpu_seconds:.0f} CPU seconds"
    )


def table(tallies: Sequence[campaign.Tally]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| format | mutations | accepted | refused | failures | slowest s | peak MB | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {one.name} | {one.mutations:,} | {one.accepted:,} | {one.refused:,} | {one.failed:,} | {one.slowest:.2f} | "
        f"{one.peak / 1e6:.0f} | {one.cpu_seconds:.0f} |"
        for one in tallies
    ]


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status."""
    return command_line.run("experiments.fuzz", fuzz, argv[1:])


if __name__ == "__main__":
    process.start(main)
