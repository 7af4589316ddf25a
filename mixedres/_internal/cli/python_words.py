"""Messages for who calls the library from Python: flags of the commands become keys and keyword arguments."""

import ast
import contextlib
import functools
import json
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mixedres._internal.errors import MixedresError

P = ParamSpec("P")
T = TypeVar("T")

# Quoted as for a shell, or up to a space or the end of a sentence; '.' is a value of data.train_split.
_VALUE = r"""(?:'[^']*'|"[^"]*"|\.(?= |$)|[^\s;)]*[^\s,;.:)])"""
_KEY = rf"--config\.([\w.]+)=({_VALUE})"
_ONE = re.compile(_KEY)
_KEYS = re.compile(rf"--config\.[\w.]+={_VALUE}(?: --config\.[\w.]+={_VALUE})*")
# {flag: keyword argument of `mixedres.fit` or `mixedres.load`}
_ARGUMENTS = {
    "--config": "recipe",
    "--workdir": "workdir",
    "--from": "path",
    "--precision": "precision",
    "--labels": "class_names",
    "--preprocessing": "preprocessing",
    "--model_version": "version",
}
_ARGUMENT = re.compile(rf"({'|'.join(_ARGUMENTS)})(?:=({_VALUE}))?(?![\w.=])")
# A command to type, up to a semicolon or the end.
_COMMAND = re.compile(r"python -m mixedres\.[^;]*")


def in_python(text: str) -> str:
    """Returns a message with flags as Python has them: for --config.data.dir=photos it has {"data.dir": "photos"}.

    Commands such as python -m mixedres.replay stay as they are.
    """
    if command := _COMMAND.search(text):
        return in_python(text[: command.start()]) + command[0] + in_python(text[command.end() :])
    text = re.sub(r"'--config\.([\w.]+)=([^']*)'", r"--config.\1='\2'", text)  # quoted as a whole
    text = _KEYS.sub(_dictionary, text)
    text = re.sub(r"--config\.([\w.]*\w)", r'"\1"', text)
    text = _ARGUMENT.sub(lambda found: _ARGUMENTS[found[1]] + (f"={_quoted(found[2])}" if found[2] else ""), text)
    return re.sub(r"--clean\b", "clean=True", text)


def speaks_python(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function; errors of mixedres in it speak of keys and arguments instead of flags."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MixedresError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return wrapped


def _dictionary(found: re.Match[str]) -> str:
    return "{" + ", ".join(f'"{key}": {_literal(value)}' for key, value in _ONE.findall(found[0])) + "}"


def _quoted(text: str) -> str:
    """Returns a text in quotes."""
    return json.dumps(text[1:-1] if text[0] in "'\"" else text, ensure_ascii=False)


def _literal(text: str) -> str:
    """Returns the value of a key as Python writes it; a text without quotes gets some."""
    if text in ("true", "false", "none"):
        return text.capitalize()
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        if isinstance(value, int | float | tuple):
            return str(value) if isinstance(value, tuple) else text
    return _quoted(text)
