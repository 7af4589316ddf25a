"""Names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping


def importer(package: str, sources: Mapping[str, str]) -> Callable[[str], object]:
    """Returns a module-level `__getattr__` that imports the names in `__all__` of a package on demand.

    Args:
      package: full name of the package, its `__name__`.
      sources: for each function or class, the submodule that defines it; every other name is a submodule.

    Raises:
      AttributeError: by the returned function, for a name that is not in `__all__`.
    """

    def load(name: str) -> object:
        module = sys.modules[package]
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = importlib.import_module(f"{package}.{sources.get(name, name)}")
        value = getattr(found, name) if name in sources else found
        setattr(module, name, value)
        return value

    return load
