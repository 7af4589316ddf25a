"""The console script `mixedres`: one subcommand for each `python -m mixedres.*`."""

import importlib
from collections.abc import Callable, Sequence

from mixedres._internal.cli import command_line, console, process

USAGE = """\
mixedres COMMAND ...

  train     trains a network                     = python -m mixedres.main
  eval      evaluates a run or weights           = python -m mixedres.main --mode=eval
  predict   classifies images                    = python -m mixedres.predict
  export    writes a network for other programs  = python -m mixedres.export
  doctor    examines the numerics of a network   = python -m mixedres.doctor
  replay    explains a step that was not finite  = python -m mixedres.replay
  check     checks a folder of photographs       = python -m mixedres.photographs.check
  prepare   writes a smaller copy of a folder    = python -m mixedres.photographs.prepare

mixedres COMMAND --help says more.
"""
# {subcommand: (module with a function main(argv), arguments that come before the arguments of the user)}.
_COMMANDS = {
    "train": ("mixedres.main", ()),
    "eval": ("mixedres.main", ("--mode=eval",)),
    "predict": ("mixedres.predict.__main__", ()),
    "export": ("mixedres.export.__main__", ()),
    "doctor": ("mixedres.doctor.__main__", ()),
    "replay": ("mixedres.replay", ()),
    "check": ("mixedres.photographs.check", ()),
    "prepare": ("mixedres.photographs.prepare", ()),
}


def run_subcommand(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status."""
    name = argv[1] if argv[1:] else "--help"
    if name in command_line.HELP:
        console.show(*USAGE.splitlines())
        return 0
    if name not in _COMMANDS:
        console.complain(f"mixedres: {name!r} is not a command; use one of {', '.join(_COMMANDS)}")
        return 2
    module, first = _COMMANDS[name]
    command: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return command([f"mixedres {name}", *first, *argv[2:]])


def main() -> None:
    """Runs the process's own command line and ends the process."""
    process.start(run_subcommand)


if __name__ == "__main__":
    main()
