"""The command that trains and evaluates: flags -> config -> run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mixedres._internal.cli import command_line, console, process, signals
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import split_checkpoint
from mixedres._internal.names import PRESETS
from mixedres._internal.processes import SINGLE, SingleProcess

if TYPE_CHECKING:
    import pathlib

    from mixedres.config import Flags, Key

USAGE = """\
Trains or evaluates a network in the precision of your choice.

  python -m mixedres.main --config=configs/digits.py:fp16
  python -m mixedres.main --config=configs/imagenet.py:bf16,model=resnet101 --config.data.name=synthetic

flags:
  --config=FILE[:PRESET[,key=value...]]   config file, or the name of a shipped one such as digits; the preset is the
                                          precision (default fp32). run:WORKDIR is the config of a run
  --config.KEY=VALUE                      sets a key of the config, listed below
  --workdir=DIR                           directory of the run (default runs/FILE-PRESET); a run in it is continued.
                                          With --mode=eval also DIR@best and DIR@STEP, checkpoints of the run
  --import=FILE.py|MODULE                 run this first: it registers networks, optimizers, data sets and others that
                                          the config names (mixedres.registry); in each command that reads the run
  --mode=train|eval                       eval: evaluate the newest checkpoint of the workdir, by default with the
                                          config of that run, and write errors.html there (default train)
  --presets=all|NAME,NAME...              with --mode=eval: the same weights in each of these precisions, and how many
                                          predictions differ from those in fp32
  --clean                                 remove the run in the workdir first
  --distributed                           one of many processes that SLURM or Open MPI started (docs/scale-out.md)
  --coordinator=HOST:PORT                 without SLURM or Open MPI: where process 0 listens,
  --num_processes=N --process_id=I        the number of processes, and the index of this one, from 0
  --process_timeout=SECONDS               how long processes wait for one that does not come or answer (default 300)
  --help                                  this text; --help=data lists the keys of a section, --help=all all keys

exit status: 0 finished; 1 the run failed; 2 a mistake in the command, nothing was written; 3 a step had numbers that
were not finite, and WORKDIR/nonfinite has that step (python -m mixedres.replay WORKDIR); 4 another process of the run
was lost; 129, 130, 138, 140 and 143 stopped by SIGHUP, Ctrl-C, SIGUSR1, SIGUSR2 and SIGTERM after saving: the same
command continues from there
"""
FIRST_KEYS = (
    *("data.dir", "data.image_size", "batch_size", "epochs", "model.name"),
    *("optimizer.learning_rate", "init_from", "patience"),
)
_SMALLER = (
    "a smaller --config.batch_size, --config.microbatches=2 or more, a smaller --config.data.image_size, or fewer "
    "--config.data.threads"
)
_CONTINUES = "a run continues from its newest checkpoint when started again without --clean"


def train_or_evaluate(arguments: Sequence[str]) -> None:
    """Runs the command; if another process is lost, ends this process with status `mixedres.hosts.STATUS_LOST`."""
    if told := _help(arguments):
        console.show(*told)
        return
    from mixedres.checkpoints import RecordedRun
    from mixedres.config import config_of_run, parse_flags

    flags = parse_flags(arguments, RecordedRun.read_portable_config)
    presets = None if flags.presets is None else _presets(flags.presets)
    place, checkpoint = _place(flags)
    directory = place.absolute()
    evaluated = directory if checkpoint is None else None  # the weights of a named checkpoint are evaluated alone
    if checkpoint is not None:
        flags.config.init_from = f"{directory}@{checkpoint}"
    # Imported here, and JAX and the models later still, so that a mistake need not wait for them.
    from mixedres import run, train

    recorded = RecordedRun(directory)
    notes = recorded.left_to_command_line(flags.config) if flags.file == config_of_run(place) else []
    with _processes(flags) as group, contextlib.ExitStack() as quiet:
        if not group.is_primary:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
        for note in notes:
            console.say(note)
        if flags.mode == "eval":
            signals.raise_interrupts()
        where = directory if flags.mode == "train" else evaluated
        evaluates = flags.mode == "eval"
        plan = train.plan(flags.config, where, clean=flags.clean, evaluates=evaluates, writes=group.is_primary)
        if not evaluates:
            run.train_plan(plan, group)
            console.give_up()  # an error of the log ends no run
            return
        with run.cache_of(plan, group):
            if presets is not None:
                train.compare_presets(plan, presets, group=group)
            else:
                train.evaluate(plan, group=group, on_results=run.on_results(directory))


def _processes(flags: Flags) -> SingleProcess:
    """Returns the processes of the run, connected."""
    if not flags.distributed and flags.coordinator is None:
        return SINGLE
    from mixedres import hosts

    given = (flags.distributed, flags.coordinator, flags.num_processes, flags.process_id, flags.process_timeout)
    return hosts.join(*given)


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status, which `USAGE` explains."""
    return command_line.run("mixedres", train_or_evaluate, argv[1:], continues=_CONTINUES, smaller=_SMALLER)


def _place(flags: Flags) -> tuple[pathlib.Path, str | None]:
    """Returns the workdir that the flags name, and the checkpoint in it; raises ConfigError if there can be none."""
    name = flags.default_workdir if flags.workdir is None else flags.workdir
    if "://" in name:
        raise ConfigError(f"--workdir={name} is no directory of this machine; mount it and name where")
    place, checkpoint = split_checkpoint(command_line.path(name))
    if checkpoint is not None and flags.mode == "train":
        raise ConfigError(f"--workdir={name} names a checkpoint, and a run goes on from its newest; write {place}")
    return place, checkpoint


def _presets(text: str) -> list[str]:
    """Returns the names in the value of --presets."""
    names = [*PRESETS] if text == "all" else [name.strip() for name in text.split(",")]
    return command_line.presets("--presets", names, also=", or all")


def _help(arguments: Sequence[str]) -> list[str]:
    """Returns the lines that --help or --help=SECTION asks for; [] without such an argument."""
    for argument in arguments:
        if argument.startswith("--help="):
            return list(_keys_of(argument.partition("=")[2]))
    return [*USAGE.splitlines(), *_first_keys()] if command_line.HELP & set(arguments) else []


def _first_keys() -> list[str]:
    """Returns the names of the shipped config files, the keys that most users need, and the names of the sections."""
    try:
        from mixedres.config import KEYS, shipped_configs
    except ModuleNotFoundError as error:
        return [
            "",
            f"the keys of the config are listed here when this is installed: {command_line.missing_package(error)}",
        ]
    by_path = {key.path: key for key in KEYS}
    sections = sorted({path.partition(".")[0] for path in by_path if "." in path})
    return [
        "",
        f"shipped config files: {', '.join(shipped_configs())}",
        f"presets: {', '.join(PRESETS)}",
        "",
        "keys that most users need:",
        *(_line(by_path[path]) for path in FIRST_KEYS),
        "",
        f"the other keys: --help=SECTION, one of run, {', '.join(sections)}; --help=all lists all {len(KEYS)}",
    ]


def _keys_of(section: str) -> list[str]:
    """Returns the lines of the keys of a section; 'run' has the keys without a section, 'all' has all keys."""
    from mixedres.config import KEYS

    of = {key.path: key.path.rpartition(".")[0] or "run" for key in KEYS}
    if section not in (*of.values(), "all"):
        raise ConfigError(f"--help={section} is unknown; use one of {', '.join(dict.fromkeys(of.values()))}, all")
    return [
        "keys of the config, with their defaults before the config file sets them:",
        *(_line(key) for key in KEYS if section in (of[key.path], "all")),
    ]


def _line(key: Key) -> str:
    default = "not set" if key.default is None else repr(key.default)
    others = ", ".join(value for value in key.range.values if value != key.default)
    return f"  {key.path:<32} {key.doc} ({default}{others and f'; or {others}'})"


if __name__ == "__main__":
    process.start(main)
