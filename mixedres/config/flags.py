"""The flags of a training command as a config."""

import os
import pathlib
import re
import traceback
import warnings
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from mixedres._internal.errors import ConfigError, one_line
from mixedres._internal.files import open_regular
from mixedres._internal.names import PROCESS_FLAGS
from mixedres.config import check_key, validate
from mixedres.config.keys import KEYS

_PACKAGE = pathlib.Path(__file__).parent
# The shipped config files: inside an installed package, and beside the package in a checkout.
RECIPES = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "configs")


def parse(argv: Sequence[str]) -> flags.FlagValues:
    """The flags of a command line, `argv[0]` being the program; `.config` is the config with its overrides.

    Raises:
      ConfigError: for a mistake in them.
    """
    for argument in argv[1:]:
        if argument.startswith("--config."):
            check_key(argument.removeprefix("--config.").partition("=")[0])
    argv = _with_config_of_run(_with_shipped_recipe(argv))
    _check_file(given(argv).partition(":")[0])
    values = _define(argv)
    try:
        with warnings.catch_warnings():  # Python may have been told to turn those of the loader into errors
            warnings.simplefilter("ignore", DeprecationWarning)
            rest = values(list(argv))
            getattr(values.config, "seed", None)  # an unreadable file raises only when it is used
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"flag --{error.flagname} is unknown; --help lists them all") from None
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_illegal_value(error)) from None
    except flags.Error as error:
        raise ConfigError(one_line(error)) from None
    except OSError:
        raise ConfigError(
            f"--config={given(argv)} cannot be read; name a file such as configs/digits.py:fp16 or one of the shipped "
            f"recipes: {', '.join(recipes())}"
        ) from None
    except SystemExit:
        raise ConfigError(f"--config={given(argv)} ends the program; a config file must return a ConfigDict") from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
    except ConfigError:
        raise
    except Exception as error:  # whatever the config file did wrong
        if str(error).endswith("has no attribute 'get_config'"):
            raise ConfigError(
                f"--config={given(argv)} has no function get_config; write one as in {RECIPES[-1] / 'digits.py'}"
            ) from None
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ConfigError(f"--config={given(argv)}, line {line}: {type(error).__name__}: {error}") from None
    _check(values, rest, argv)
    return values


def _check_file(path: str) -> None:
    """Raises ConfigError for a config file that is a pipe, a device or a directory; a missing one is noticed later."""
    try:
        if os.path.exists(path):
            open_regular(path).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config={path} cannot be read ({reason}); name a file such as configs/digits.py") from None


def _define(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "config file", flag_values=values, sys_argv=list(argv))
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "what to do", flag_values=values)
    flags.DEFINE_string("presets", None, "precisions to compare", flag_values=values)
    flags.DEFINE_boolean("clean", False, "remove an earlier run first", flag_values=values)
    flags.DEFINE_boolean("distributed", False, "find the other processes", flag_values=values)
    flags.DEFINE_string("coordinator", None, "where process 0 listens", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "index of this process", flag_values=values)
    flags.DEFINE_float("process_timeout", 300.0, "seconds", flag_values=values)
    return values


def _check(values: flags.FlagValues, rest: Sequence[str], argv: Sequence[str]) -> None:
    """Raises ConfigError for flags that do not go together, and validates the config."""
    if not given(argv):
        raise ConfigError("--config is missing; try --config=configs/digits.py:fp16")
    if not isinstance(values.config, ConfigDict):
        raise ConfigError(f"--config={given(argv)}: get_config must return a ConfigDict, not {values.config!r}")
    validate(values.config)
    if values.workdir == "":
        raise ConfigError("--workdir= is empty; name a directory")
    if values.clean and values.mode == "eval":
        raise ConfigError("--clean would remove what --mode=eval evaluates; give one of them")
    if values.presets is not None and values.mode != "eval":
        raise ConfigError("--presets compares precisions in an evaluation; add --mode=eval")
    _check_processes(
        values.distributed, values.coordinator, values.num_processes, values.process_id, values.process_timeout
    )
    if rest[1:]:
        raise ConfigError(f"{rest[1]!r} is not a flag; flags begin with --, and --help lists them all")


def _check_processes(
    distributed: bool, address: str | None, count: int | None, index: int | None, timeout: float
) -> None:
    """Raises ConfigError for flags of many processes that do not go together."""
    given = {"--coordinator": address, "--num_processes": count, "--process_id": index}
    missing = [flag for flag, value in given.items() if value is None]
    port = re.fullmatch(r"\S+:(\d{1,5})", address or "host:1")
    for right, mistake in (
        (
            not distributed or len(missing) == 3,
            f"--distributed finds the others; give it alone, or only {PROCESS_FLAGS}",
        ),
        (len(missing) in (0, 3), f"{' and '.join(missing)} missing; many processes need all of {PROCESS_FLAGS}"),
        (timeout > 0, f"--process_timeout={timeout:g} must be > 0 seconds"),
        (port and 0 < int(port[1]) < 65536, f"--coordinator={address} is not HOST:PORT; write such as 10.0.0.1:7733"),
        (count is None or count >= 1, f"--num_processes={count} must be >= 1"),
        (index is None or 0 <= index < (count or 1), f"--process_id={index} must be from 0 to {(count or 1) - 1}"),
    ):
        if not right:
            raise ConfigError(mistake)


def given(argv: Sequence[str]) -> str:
    """The value of --config on the command line; '' without one."""
    return _value("config", argv)


def _value(name: str, argv: Sequence[str]) -> str:
    """The value of the flag `name`; '' without one."""
    index, prefix = _place(name, argv)
    return argv[index].removeprefix(prefix) if index < len(argv) else ""


def _place(name: str, argv: Sequence[str]) -> tuple[int, str]:
    """The index of the argument that has the value of the flag `name`, and what stands before the value in it."""
    for index, argument in enumerate(argv):
        flag, equals, _ = argument.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            return (index, flag + equals) if equals else (index + 1, "")
    return len(argv), ""


def default_workdir(argv: Sequence[str], config: ConfigDict) -> str:
    """runs/digits-fp16 for configs/digits.py with the preset fp16."""
    return f"runs/{pathlib.Path(given(argv).partition(':')[0]).stem}-{config.precision.name}"


def config_of_run(workdir: str | pathlib.Path) -> str:
    """The value of --config that means the config which the run in `workdir` recorded."""
    return f"{_PACKAGE / 'recorded.py'}:{workdir}"


def _with_config_of_run(argv: Sequence[str]) -> Sequence[str]:
    """The command line with the config of the run that it evaluates, where it names none."""
    workdir = _value("workdir", argv)
    if given(argv) or not workdir or _value("mode", argv) != "eval":
        return argv
    return [argv[0], f"--config={config_of_run(workdir)}", *argv[1:]]


def recipes() -> list[str]:
    """Names of the shipped config files, such as 'digits'."""
    return sorted({file.stem for folder in RECIPES for file in folder.glob("[a-z]*.py")})


def _with_shipped_recipe(argv: Sequence[str]) -> list[str]:
    """The command line with the path of a shipped recipe where --config names one that is no file here.

    Both 'digits:fp16' and 'configs/digits.py:fp16' name the recipe digits.
    """
    wanted = given(argv)
    file, colon, preset = wanted.partition(":")
    path = pathlib.Path(file)
    is_name = path.suffix in ("", ".py") and str(path.parent) in (".", "configs")
    if not file or not is_name or path.is_file():
        return list(argv)
    found = [folder / f"{path.stem}.py" for folder in RECIPES if (folder / f"{path.stem}.py").is_file()]
    if not found:
        return list(argv)
    index, prefix = _place("config", argv)
    return [*argv[:index], f"{prefix}{found[0]}{colon}{preset}", *argv[index + 1 :]]


def _illegal_value(error: flags.IllegalFlagValueError) -> str:
    """absl's message, with the type that the key wants in place of what Python said of the conversion."""
    lines = str(error).strip().splitlines()
    flag, _, reason = " ".join(lines).removeprefix("flag ").partition(": ")
    if "Traceback" in reason:  # a ValueError of the config file: its last line says what it was
        reason = lines[-1]
    path = flag.removeprefix("--config.").partition("=")[0]
    wanted = {key.path: f"config.{path} must be of type {key.type.__name__}" for key in KEYS}
    return f"{flag}: {wanted.get(path, reason)}"
