"""Command line of a training as a config and its other flags."""

import argparse
import dataclasses
import pathlib
import re
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ml_collections import ConfigDict

from mixedres._internal import registry
from mixedres._internal.cli.command_line import Parser
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import split_checkpoint
from mixedres._internal.names import PROCESS_FLAGS
from mixedres.config.keys import KEYS
from mixedres.config.values import BOOLEANS, check_key, is_switch, key_path, override, validate

# Function from a workdir to the config that the run in it recorded; the package of checkpoints lies above this one.
ReadRun: TypeAlias = Callable[[pathlib.Path], ConfigDict]
_PACKAGE = pathlib.Path(__file__).parent
# The shipped config files: inside an installed package, and beside the package in a checkout.
SHIPPED = (_PACKAGE / "shipped", _PACKAGE.parent.parent / "configs")


@dataclasses.dataclass
class Flags:
    """Flags of a command line.

    Attributes:
      file: value of --config, 'FILE' or 'FILE:PRESET,key=value,...'; None if not given.
      config: the config with its overrides, validated.
      workdir: directory of the run; None if not given.
      mode: 'train' or 'eval'.
      presets: value of --presets; None if not given.
      clean: remove an earlier run first.
      distributed: find the other processes by SLURM or Open MPI.
      coordinator: address HOST:PORT of process 0; None for one process, or with `distributed`.
      num_processes, process_id: number of processes and index of this one; None without `coordinator`.
      process_timeout: seconds that processes wait for one that does not answer.
    """

    file: str | None = None
    config: ConfigDict = dataclasses.field(default_factory=ConfigDict)
    workdir: str | None = None
    mode: str = "train"
    presets: str | None = None
    clean: bool = False
    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    process_timeout: float = 300.0

    @property
    def default_workdir(self) -> str:
        """Returns the directory of a run without `workdir`: 'runs/digits-fp16' for configs/digits.py:fp16."""
        return f"runs/{pathlib.Path(str(self.file).partition(':')[0]).stem}-{self.config.precision.name}"


def parse_flags(arguments: Sequence[str], read_run: ReadRun | None = None) -> Flags:
    """Parses the arguments of a training command, without the name of the program.

    `read_run` returns the config that the run in a workdir recorded; None: the config of a run cannot be named. Raises
    ConfigError for a mistake in the arguments or in the config file.
    """
    flags, rest = _parser().parse_known_args(_joined(arguments), Flags())
    if not flags.file and flags.mode == "eval" and flags.workdir:
        flags.file = config_of_run(split_checkpoint(pathlib.Path(flags.workdir))[0])
    if not flags.file and flags.mode == "eval":
        raise ConfigError("--workdir is missing; name a run, such as --workdir=runs/digits-fp16")
    if not flags.file:
        raise ConfigError("--config is missing; try --config=configs/digits.py:fp16")
    flags.config = load_config(flags.file, read_run)
    for argument in rest:
        override(flags.config, *_key_and_text(argument))
    validate(flags.config)
    _check(flags)
    return flags


def _parser() -> Parser:
    parser = Parser("mixedres", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", "-config", dest="file")
    parser.add_argument("--mode", choices=["train", "eval"])
    for name in ("--workdir", "--presets", "--coordinator"):
        parser.add_argument(name)
    for name in ("--clean", "--distributed"):
        parser.add_argument(name, action="store_true")
    for name in ("--num_processes", "--process_id"):
        parser.add_argument(name, type=int)
    parser.add_argument("--process_timeout", type=float)
    return parser


def override_machine(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Sets keys that act on this machine from arguments '--config.KEY=VALUE' of a command that reads a run.

    Raises ConfigError for a mistake in an argument, and for a key that only the run sets.
    """
    allowed = [key.path for key in KEYS if not key.is_portable]
    for argument in _joined(arguments):
        path, text = _key_and_text(argument)
        if path not in allowed:
            check_key(path)
            raise ConfigError(
                f"config.{path} is the run's; here only keys of this machine can be set, such as data.dir"
            )
        override(config, path, text)
    validate(config)


def _joined(arguments: Sequence[str]) -> list[str]:
    """Joins '--config.KEY' and a VALUE that follows as an argument of its own: '--config.KEY=VALUE'."""
    joined: list[str] = []
    for argument in arguments:
        flag = joined[-1] if joined else ""
        if flag.startswith("--config.") and "=" not in flag:
            is_value = argument in BOOLEANS if is_switch(flag[len("--config.") :]) else not argument.startswith("--")
            if is_value:
                joined[-1] = f"{flag}={argument}"
                continue
        joined.append(argument)
    return joined


def _key_and_text(argument: str) -> tuple[str, str]:
    """Returns the key and the text of '--config.KEY=VALUE'; the text of a boolean key without a value is 'true'."""
    flag, equals, text = argument.partition("=")
    if not flag.startswith("--"):
        raise ConfigError(f"{argument!r} is not a flag; flags begin with --, and --help=all lists them")
    if not flag.startswith("--config."):
        key = key_path(flag.removeprefix("--"))
        meant = f"did you mean --config.{key}? " if key in {key.path for key in KEYS} else ""
        raise ConfigError(f"flag {flag} is unknown; {meant}--help and --help=all list them")
    path = flag.removeprefix("--config.")
    if not equals and not is_switch(path):
        raise ConfigError(f"flag {flag} has no value; write {flag}=VALUE")
    return path, text if equals else "true"


def load_config(argument: str, read_run: ReadRun | None = None) -> ConfigDict:
    """Returns the config that a value of --config names.

    `argument`: 'FILE' or 'FILE:PRESET,key=value,...'; FILE is a path or the name of a shipped config. 'run:WORKDIR' is
    the config that a run recorded. Raises ConfigError for a file that cannot be read or returns no config.
    """
    name, _, choice = argument.partition(":")
    if name == "run" and read_run is not None:
        return read_run(pathlib.Path(choice).expanduser())
    try:
        module = registry.run_file(_shipped_or_file(name))
        if not hasattr(module, "get_config"):
            sample = SHIPPED[-1] / "digits.py"
            raise ConfigError(f"--config={argument} has no function get_config; write one as in {sample}")
        config = module.get_config(*[choice] if choice else [])
    except OSError as error:
        if ":" not in argument and "=" in argument:
            file, _, keys = argument.partition(",")
            raise ConfigError(f"--config={argument} names no preset; write --config={file}:fp16,{keys}") from None
        raise ConfigError(
            f"--config={argument} cannot be read ({error.strerror}); name a file such as configs/digits.py:fp16 or one "
            f"of the shipped configs: {', '.join(shipped_configs())}"
        ) from None
    except SystemExit:
        raise ConfigError(f"--config={argument} ends the program; a config file must return a ConfigDict") from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except ConfigError:
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ConfigError(f"--config={argument}, line {line}: {type(error).__name__}: {error}") from None
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={argument}: get_config must return a ConfigDict, not {config!r}")
    return config


def _shipped_or_file(name: str) -> pathlib.Path:
    """Returns a file as it is, or the config for 'digits', 'digits.py' and 'configs/digits.py' if they are no file."""
    path = pathlib.Path(name)
    if path.is_file() or path.suffix not in ("", ".py") or str(path.parent) not in (".", "configs"):
        return path
    shipped = (folder / f"{path.stem}.py" for folder in SHIPPED)
    return next((file for file in shipped if file.is_file()), path)


def shipped_configs() -> list[str]:
    """Returns the names of the shipped config files, such as 'digits'."""
    return sorted({file.stem for folder in SHIPPED for file in folder.glob("[a-z]*.py")})


def config_of_run(workdir: str | pathlib.Path) -> str:
    """Returns the value of --config that names the config recorded by the run in `workdir`."""
    return f"run:{workdir}"


def _check(flags: Flags) -> None:
    """Raises ConfigError if a flag has an invalid value, or if flags exclude or require each other."""
    index, count, timeout = flags.process_id, flags.num_processes, flags.process_timeout
    evaluates = flags.mode == "eval"
    group = {"--coordinator": flags.coordinator, "--num_processes": count, "--process_id": index}
    missing = [flag for flag, value in group.items() if value is None]
    port = re.fullmatch(r"\S+:(\d{1,5})", flags.coordinator or "host:1")
    alone = f"--distributed finds the others; give it alone, or only {PROCESS_FLAGS}"
    address = f"--coordinator={flags.coordinator} is not HOST:PORT; write such as 10.0.0.1:7733"
    for right, mistake in (
        (flags.workdir != "", "--workdir= is empty; name a directory"),
        (not (flags.clean and evaluates), "--clean would remove what --mode=eval evaluates; give one of them"),
        (evaluates or flags.presets is None, "--presets compares precisions in an evaluation; add --mode=eval"),
        (not flags.distributed or len(missing) == 3, alone),
        (len(missing) in (0, 3), f"{' and '.join(missing)} missing; many processes need all of {PROCESS_FLAGS}"),
        (timeout > 0, f"--process_timeout={timeout:g} must be > 0 seconds"),
        (port and 0 < int(port[1]) < 65536, address),
        (count is None or count >= 1, f"--num_processes={count} must be >= 1"),
        (index is None or 0 <= index < (count or 1), f"--process_id={index} must be from 0 to {(count or 1) - 1}"),
    ):
        if not right:
            raise ConfigError(mistake)
