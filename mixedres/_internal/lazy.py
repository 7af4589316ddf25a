"""Names of a package that are imported when they are first used, and imports without optional packages."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any


def importer(package: str) -> Callable[[str], object]:
    """Returns a module-level `__getattr__` that imports a package's names on demand; raises AttributeError for others.

    The names and their places are the imports for type checkers, below ``if TYPE_CHECKING`` in the package's
    `__init__`. Reading them takes 0.2 ms, at the first use of a name.
    """

    def load(name: str) -> object:
        module = sys.modules[package]
        if name not in module.__all__ or name not in (places := _places(package)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = module if places[name] == package else importlib.import_module(places[name])
        # A module below the place; no file has the name of a public function.
        is_module = hasattr(place, "__path__") and importlib.util.find_spec(f"{place.__name__}.{name}") is not None
        value = importlib.import_module(f"{place.__name__}.{name}") if is_module else getattr(place, name)
        setattr(module, name, value)
        return value

    module = sys.modules[package]
    module.__dir__ = lambda: sorted({*vars(module), *module.__all__})  # type: ignore[method-assign]  # for help()
    return load


@functools.cache
def _places(package: str) -> dict[str, str]:
    """Returns the module of each name that a package imports for type checkers."""
    source = pathlib.Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def function_at(place: str) -> Callable[..., Any]:
    """Returns the function at a place such as 'json:dumps'; its module is imported when the function is called."""
    return lambda *given: pkgutil.resolve_name(place)(*given)


def constant_at(place: str) -> Callable[[], Any]:
    """Returns a function that returns the constant at a place such as 'string:digits', or a module."""
    return lambda: pkgutil.resolve_name(place)


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Makes imports of these modules fail inside the block, in every thread, unless they were imported before."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
