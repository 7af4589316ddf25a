"""Command line of a training as a config and its other flags."""

import argparse
import dataclasses
import importlib.util
import pathlib
import re
import traceback
from collections.abc import Sequence
from types import ModuleType

from ml_collections import ConfigDict

from mixedres._internal.command_line import Parser
from mixedres._internal.errors import ConfigError
from mixedres._internal.files import open_regular
from mixedres._internal.names import PROCESS_FLAGS
from mixedres.config.values import BOOLEANS, is_switch, override, validate

_PACKAGE = pathlib.Path(__file__).parent
# The shipped config files: inside an installed package, and beside the package in a checkout.
RECIPES = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "configs")


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of a command line.

    Attributes:
      config: the config with its overrides, validated.
      workdir: directory of the run; None if the command line names none.
      default_workdir: directory of a run without `workdir`: 'runs/digits-fp16' for configs/digits.py:fp16.
      mode: 'train' or 'eval'.
      presets: text of --presets; None if not given.
      clean: remove an earlier run first.
      distributed: find the other processes by SLURM or Open MPI.
      coordinator: address HOST:PORT of process 0; None for one process, or with `distributed`.
      num_processes, process_id: number of processes and index of this one; None without `coordinator`.
      process_timeout: seconds that processes wait for one that does not answer.
    """

    config: ConfigDict
    workdir: str | None
    default_workdir: str
    mode: str
    presets: str | None
    clean: bool
    distributed: bool
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    process_timeout: float


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Parses the arguments of a training command, without the name of the program.

    Raises:
      ConfigError: for a mistake in the arguments or in the config file.
    """
    options, rest = _parser().parse_known_args(_quoted(arguments))
    if not options.config and options.mode == "eval" and options.workdir:
        options.config = config_of_run(options.workdir)
    if not options.config:
        raise ConfigError("--config is missing; try --config=configs/digits.py:fp16")
    config = load_config(options.config)
    for path, text in _overrides(rest):
        override(config, path, text)
    validate(config)
    name = pathlib.Path(options.config.partition(":")[0]).stem
    values = vars(options) | {"config": config, "default_workdir": f"runs/{name}-{config.precision.name}"}
    flags = Flags(**values)
    _check(flags)
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = Parser("mixedres", add_help=False)
    for name in ("--workdir", "--presets", "--coordinator"):
        parser.add_argument(name)
    parser.add_argument("--config", "-config")
    parser.add_argument("--mode", default="train", choices=["train", "eval"])
    for name in ("--clean", "--distributed"):
        parser.add_argument(name, action="store_true")
    for name in ("--num_processes", "--process_id"):
        parser.add_argument(name, type=int)
    parser.add_argument("--process_timeout", type=float, default=300.0)
    return parser


def _quoted(arguments: Sequence[str]) -> list[str]:
    """Joins '--config.KEY' and a VALUE that follows as an argument of its own: '--config.KEY=VALUE'."""
    joined: list[str] = []
    for argument in arguments:
        before = joined[-1] if joined else ""
        has_no_value = before.startswith("--config.") and "=" not in before
        if has_no_value and _is_value(before.removeprefix("--config."), argument):
            joined[-1] = f"{before}={argument}"
        else:
            joined.append(argument)
    return joined


def _is_value(path: str, argument: str) -> bool:
    return argument in BOOLEANS if is_switch(path) else not argument.startswith("--")


def _overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (key, text) of each '--config.KEY=VALUE'; a boolean key without a value is true."""
    overrides = []
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{argument!r} is not a flag; flags begin with --, and --help lists them all")
        if not flag.startswith("--config."):
            raise ConfigError(f"flag {flag} is unknown; --help lists them all")
        path = flag.removeprefix("--config.")
        if not equals and not is_switch(path):
            raise ConfigError(f"flag {flag} has no value; write {flag}=VALUE")
        overrides.append((path, text if equals else "true"))
    return overrides


def load_config(argument: str) -> ConfigDict:
    """Returns the config that a value of --config names.

    Args:
      argument: 'FILE' or 'FILE:PRESET,key=value,...'; FILE is a path or the name of a shipped recipe.

    Raises:
      ConfigError: for a file that cannot be read or returns no config.
    """
    name, _, choice = argument.partition(":")
    try:
        module = _load_module(_recipe_or_file(name))
        if not hasattr(module, "get_config"):
            sample = RECIPES[-1] / "digits.py"
            raise ConfigError(f"--config={argument} has no function get_config; write one as in {sample}")
        config = module.get_config(*[choice] if choice else [])
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) and "null byte" not in str(error):
            raise _raised_by(argument, error) from None
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise ConfigError(
            f"--config={argument} cannot be read{reason}; name a file such as configs/digits.py:fp16 or one of the "
            f"shipped recipes: {', '.join(recipes())}"
        ) from None
    except SystemExit:
        raise ConfigError(f"--config={argument} ends the program; a config file must return a ConfigDict") from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except ConfigError:
        raise
    except Exception as error:
        raise _raised_by(argument, error) from None
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={argument}: get_config must return a ConfigDict, not {config!r}")
    return config


def _raised_by(argument: str, error: Exception) -> ConfigError:
    line = traceback.extract_tb(error.__traceback__)[-1].lineno
    return ConfigError(f"--config={argument}, line {line}: {type(error).__name__}: {error}")


def _load_module(path: pathlib.Path) -> ModuleType:
    open_regular(path).close()  # a pipe or a device would never end
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path} is not a Python file; name one such as configs/digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _recipe_or_file(name: str) -> pathlib.Path:
    """Returns a file as it is, or the recipe for 'digits', 'digits.py' and 'configs/digits.py' if they are no file."""
    path = pathlib.Path(name)
    if path.is_file() or path.suffix not in ("", ".py") or str(path.parent) not in (".", "configs"):
        return path
    shipped = (folder / f"{path.stem}.py" for folder in RECIPES)
    return next((file for file in shipped if file.is_file()), path)


def recipes() -> list[str]:
    """Returns the names of the shipped config files, such as 'digits'."""
    return sorted({file.stem for folder in RECIPES for file in folder.glob("[a-z]*.py")})


def config_of_run(workdir: str | pathlib.Path) -> str:
    """Returns the value of --config that names the config recorded by the run in `workdir`."""
    return f"{_PACKAGE.parent / 'checkpoints' / 'recorded.py'}:{workdir}"


def _check(flags: Flags) -> None:
    """Raises ConfigError for flags that do not go together."""
    index, count, timeout, evaluates = (
        flags.process_id,
        flags.num_processes,
        flags.process_timeout,
        flags.mode == "eval",
    )
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
