"""The command line: flags -> config -> train or evaluate."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from mixedres import precision, processes
from mixedres.config import ConfigError, NonFiniteError, TrainingError, check_key, validate
from mixedres.config_keys import KEYS
from mixedres.data import DataError
from mixedres.interrupts import Stopped

USAGE = """\
Trains a ResNet in the precision of your choice.

  python -m mixedres.main --config=configs/digits.py:fp16
  python -m mixedres.main --config=configs/imagenet.py:bf16,model=resnet101 --config.data.name=synthetic

flags:
  --config=FILE[:PRESET[,key=value...]]   config file; the preset is the precision (default fp32)
  --config.KEY=VALUE                      sets a key of the config, listed below
  --workdir=DIR                           directory of the run (default runs/FILE-PRESET); a run in it is continued
  --mode=train|eval                       eval: evaluate the newest checkpoint of the workdir (default train)
  --presets=all|NAME,NAME...              with --mode=eval: the same weights in each of these precisions, and how many
                                          predictions differ from those in fp32
  --clean                                 remove the run in the workdir first
  --distributed                           one of many processes that SLURM or Open MPI started (docs/scale-out.md)
  --coordinator=HOST:PORT                 or as told here: where process 0 listens,
  --num_processes=N --process_id=I        how many processes there are, and which this is, from 0
  --process_timeout=SECONDS               how long processes wait for one that does not come or answer (default 300)
  --help                                  this text

exit status: 0 finished; 1 the run failed; 2 a mistake in what was given, nothing was written; 3 the numbers of a step
were not finite, and WORKDIR/nonfinite has that step (python -m mixedres.replay WORKDIR); 4 another process of the run
was lost; 130 and 143 stopped by Ctrl-C and SIGTERM after saving: the same command goes on from there
"""


def parse(argv: Sequence[str]) -> flags.FlagValues:
    """The flags of a command line, `argv[0]` being the program; `.config` is the config with its overrides.

    Raises:
      ConfigError: for a mistake in them.
    """
    for argument in argv[1:]:
        if argument.startswith("--config."):
            check_key(argument.removeprefix("--config.").partition("=")[0])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "config file", flag_values=values, sys_argv=list(argv))
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "what to do", flag_values=values)
    flags.DEFINE_string("presets", None, "precisions to compare", flag_values=values)
    flags.DEFINE_boolean("clean", False, "remove an earlier run first", flag_values=values)
    flags.DEFINE_boolean("distributed", False, "find the other processes", flag_values=values)
    flags.DEFINE_string("coordinator", None, "where process 0 listens", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "which of them this is", flag_values=values)
    flags.DEFINE_float("process_timeout", 300.0, "seconds", flag_values=values)
    try:
        rest = values(list(argv))
        getattr(values.config, "seed", None)  # a file that could not be read says so only when it is used
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"flag --{error.flagname} is unknown; --help lists them all") from None
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_illegal_value(error)) from None
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from None
    except OSError:
        raise ConfigError(
            f"--config={_given(argv)} cannot be read; name a file such as configs/digits.py:fp16"
        ) from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except ConfigError:
        raise
    except Exception as error:  # whatever the config file did wrong
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ConfigError(f"--config={_given(argv)}, line {line}: {type(error).__name__}: {error}") from None
    if not _given(argv):
        raise ConfigError("--config is missing; try --config=configs/digits.py:fp16")
    if not isinstance(values.config, ConfigDict):
        raise ConfigError(f"--config={_given(argv)}: get_config must return a ConfigDict, not {values.config!r}")
    validate(values.config)
    if values.workdir == "":
        raise ConfigError("--workdir= is empty; name a directory")
    if values.clean and values.mode == "eval":
        raise ConfigError("--clean would remove what --mode=eval evaluates; give one of them")
    if values.presets is not None and values.mode != "eval":
        raise ConfigError("--presets compares precisions in an evaluation; add --mode=eval")
    if rest[1:]:
        raise ConfigError(f"{rest[1]!r} is not a flag; flags begin with --, and --help lists them all")
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, which `USAGE` explains.

    Where another process is lost, this one ends with status 4 (`processes.STATUS_LOST`) and does not return.
    """
    if {"--help", "-h", "--helpfull", "--helpshort"} & set(argv[1:]):
        print(USAGE + "\n".join(_key_help()))
        return 0
    try:
        values = parse(argv)
        # Imported here so that a mistake in the flags need not wait for Orbax and the models.
        from mixedres import evaluation, train

        name = _default_workdir(argv, values.config) if values.workdir is None else values.workdir
        directory = pathlib.Path(name).expanduser().absolute()
        with _join(values) as group, contextlib.ExitStack() as quiet:
            if not group.is_writer:
                nowhere = quiet.enter_context(open(os.devnull, "w"))
                quiet.enter_context(contextlib.redirect_stdout(nowhere))
            if values.presets is not None:
                evaluation.compare(values.config, directory, _presets(values.presets), group=group)
            elif values.mode == "eval":
                evaluation.evaluate(values.config, directory, group=group)
            else:
                train.train(values.config, directory, clean=values.clean, group=group)
    except ConfigError as error:
        return _fail(2, error)
    except NonFiniteError as error:
        return _fail(3, error)
    except (TrainingError, DataError) as error:
        return _fail(1, error)
    except Stopped as stopped:
        return _fail(stopped.status, stopped)
    except KeyboardInterrupt:
        return _fail(130, "interrupted; a run continues from its newest checkpoint when started again without --clean")
    return 0


def _presets(given: str) -> list[str]:
    """The names in the value of --presets."""
    names = list(precision.PRESETS) if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in precision.PRESETS:
            raise ConfigError(f"--presets: {name!r} is unknown; use all, or some of {','.join(precision.PRESETS)}")
    return names


def _join(values: flags.FlagValues) -> processes.Processes:
    """The processes of the run, this one among them."""
    return processes.join(
        values.distributed, values.coordinator, values.num_processes, values.process_id, values.process_timeout
    )


def _fail(status: int, message: object) -> int:
    print(f"mixedres: {message}", file=sys.stderr)
    return status


def _given(argv: Sequence[str]) -> str:
    """The value of --config on the command line."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if argument in ("--config", "-config"):
            return following
        if argument.startswith(("--config=", "-config=")):
            return argument.partition("=")[2]
    return ""


def _illegal_value(error: flags.IllegalFlagValueError) -> str:
    """absl's message, with the type that the key wants in place of what Python said of the conversion."""
    lines = str(error).strip().splitlines()
    given, _, reason = " ".join(lines).removeprefix("flag ").partition(": ")
    if "Traceback" in reason:  # a ValueError of the config file: its last line says what it was
        reason = lines[-1]
    path = given.removeprefix("--config.").partition("=")[0]
    wanted = {key.path: f"config.{path} must be of type {key.type.__name__}" for key in KEYS}
    return f"{given}: {wanted.get(path, reason)}"


def _default_workdir(argv: Sequence[str], config: ConfigDict) -> str:
    """runs/digits-fp16 for configs/digits.py with the preset fp16."""
    stem = pathlib.Path(_given(argv).partition(":")[0]).stem
    return f"runs/{stem}-{config.precision.name}"


def _key_help() -> list[str]:
    lines = ["", "keys of the config, with their defaults before the config file sets them:"]
    for key in KEYS:
        default = "not set" if key.default is None else repr(key.default)
        lines.append(f"  {key.path:<32} {key.doc} ({default})")
    return lines


def _must_leave_at_once(status: int) -> bool:
    """Whether the interpreter's own way out is not to be taken; everything is closed by now.

    It can crash (segmentation fault, seen with JAX 0.10.2) where Ctrl-C came during a compilation, and after an error
    it waits for the other processes where there are some.
    """
    from jax import distributed

    return status > 128 or (status != 0 and distributed.is_initialized())


if __name__ == "__main__":
    status = main(sys.argv)
    if _must_leave_at_once(status):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
