"""Names of a package that are imported when they are first used, and imports without optional packages."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping


def importer(package: str, sources: Mapping[str, str]) -> Callable[[str], object]:
    """Returns a module-level `__getattr__` that imports the names in `__all__` of a package on demand.

    Args:
      package: full name of the package, its `__name__`.
      sources: the submodule of each function or class, and the path below the package of each module of a subpackage. A
        name that is missing here is itself a submodule.

    Raises:
      AttributeError: by the returned function, for a name that is not in `__all__`.
    """

    def load(name: str) -> object:
        module = sys.modules[package]
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = sources.get(name, name)
        found = importlib.import_module(f"{package}.{place}")
        is_module = place.rpartition(".")[2] == name  # no file has the name of a public function
        value = found if is_module else getattr(found, name)
        setattr(module, name, value)
        return value

    return load


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Makes imports of these modules fail inside the block, in every thread.

    A library that is imported in the block, and that uses these modules only if they are installed, does without them
    from then on. Modules that were imported before can still be imported.
    """
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
