"""Shared behavior of all commands: parser, one-line errors, exit statuses."""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mixedres._internal import environment, files, registry
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, MixedresError, config_errors
from mixedres._internal.names import PRESETS, __version__, unknown_preset

IMPORT = "run this first: it registers networks, data sets and others that a config names (mixedres.registry)"
HELP = {"--help", "-h", "--helpfull", "--helpshort"}
# Extra of the package that brings a module; "train" brings the others.
_EXTRAS = {
    "tensorflow": "tf",
    "wandb": "wandb",
    "torch": "interop",
    "transformers": "interop",
    **dict.fromkeys(("matplotlib", "rich", "submitit", "tabulate"), "experiments"),
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for a mistake, and takes no abbreviations of its options."""

    def __init__(self, prog: str, description: str | None = None, **options: Any) -> None:
        """Takes `prog` as a user types it, and a `description` that is printed unchanged."""
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if pathlib.Path(sys.argv[0]).name == "mixedres":
            prog = " ".join(["mixedres", *sys.argv[1:2]])
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)
        if options.get("add_help", True):  # for --help: `run` takes the flag away
            self.add_argument("--import", metavar="FILE.py|MODULE", help=IMPORT)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; --help says more")


def path(given: str) -> pathlib.Path:
    """Returns the path that an argument names; raises ConfigError for a ~user who does not exist."""
    try:
        return files.expanded(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the option --from, which names a run or weights that exist; the parsed attribute is `source`."""
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        type=_existing_source,
        help="a workdir (its newest checkpoint; WORKDIR@best and WORKDIR@STEP name others), .safetensors, .pth, "
        ".keras, .h5, a folder of transformers, a checkpoint of TensorFlow",
    )


def _existing_source(given: str) -> str:
    with config_errors("--from"):
        files.check_weights_exist(path(given))
    return given


def presets(flag: str, names: Sequence[str], *, also: str = "") -> list[str]:
    """Returns the names, each once; raises ConfigError, with `also` at its end, for a name that is no preset."""
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"{flag}: {unknown_preset(name)}{also}")
    return list(dict.fromkeys(names))


def run(
    program: str,
    command: Callable[[Sequence[str]], Any],
    arguments: Sequence[str],
    *,
    continues: str = "",  # how to go on after an interruption; file errors then have status 1
    smaller: str = "",  # what to set where the memory does not suffice
) -> int:
    """Calls a command with its arguments and returns its exit status; prints one line where it fails.

    Statuses: that of a `MixedresError`; 130 for Ctrl-C; 2 for a file that was named and cannot be read or written, 1
    where the output cannot be written or the memory does not suffice; 2 for a package that is not installed.
    """
    try:
        command(_imported(arguments))
        sys.stdout.flush()  # here, where it may fail
    except MixedresError as error:
        return _fail(program, error.status, str(error))
    except KeyboardInterrupt:
        return _fail(program, 130, "; ".join(filter(None, ("interrupted", continues))))
    except BrokenPipeError:  # the reader, such as head, has seen enough
        console.give_up()
        return 1
    except ModuleNotFoundError as error:
        return _fail(program, 2, missing_package(error))
    except (MemoryError, RuntimeError) as error:
        if (line := environment.out_of_memory(error)) is None:
            raise
        return _fail(program, 1, "; ".join(filter(None, (line, smaller and f"set {smaller}", continues))))
    except OSError as error:
        reason = error.strerror or str(error)
        of_file = f"{error.filename}: {reason}"
        if continues:
            return _fail(program, 1, f"{of_file if error.filename else reason}; {continues}")
        if error.filename is not None:
            return _fail(program, 2, of_file)
        console.give_up()  # without a name it is the output
        return _fail(program, 1, f"stdout: {reason}")
    return 0


def _imported(arguments: Sequence[str]) -> list[str]:
    """Imports what --import names, so that a config may name what it registers, and returns the other arguments."""
    others, remaining = [], iter(arguments)
    for argument in remaining:
        flag, equals, given = argument.partition("=")
        if flag != "--import":
            others.append(argument)
        elif (given := given if equals else next(remaining, "")) and not given.startswith("--"):
            registry.load(given)
        else:
            raise ConfigError("--import names nothing; write --import=FILE.py or --import=MODULE")
    return others


def typed() -> str:
    """Returns the command line of this process as a person types it: 'mixedres eval ...' or 'python -m ...'."""
    _, *rest = sys.orig_argv
    first = ["python"] if rest[:1] == ["-m"] else []
    return shlex.join([*first, *(rest if first else [pathlib.Path(rest[0]).name, *rest[1:]])])


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns a line that says which extra brings a package; raises `error` again for a module of mixedres itself."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "mixedres", "jax", "jmp", "optax", "numpy"):
        raise error
    return f"the package {name} is not installed; {how_to_install(name)}"


def how_to_install(package: str) -> str:
    """Returns the command that installs an extra, from this checkout or from a wheel: mixedres is on no registry."""
    extra, checkout = _EXTRAS.get(package, "train"), pathlib.Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file():
        return f"type in {checkout}: pip install -e '.[{extra}]'"
    return f"type: pip install 'mixedres-{__version__}-py3-none-any.whl[{extra}]', with the path of that file"


def _fail(program: str, status: int, line: str) -> int:
    console.complain(f"{program}: {line}")
    return status
