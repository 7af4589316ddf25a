"""An extension of griffe, which reads the docstrings of the API reference.

It handles three habits of this code: a function named as its module (`mixedres.amp.explain`), a constant whose
description is the comment above it, and an entry that describes several parameters (`low, high: bounds`).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# One entry of a section with several names, and its continuation lines, which are indented further.
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE)


class Exported(griffe.Extension):
    """Corrects what was read of a package."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Splits docstring entries of several names into entries of one."""
        if obj.docstring:
            obj.docstring.value = SEVERAL.sub(_split, obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Completes the exported names of a package and its subpackages."""
        for module in (pkg, *(m for m in pkg.modules.values() if not m.is_alias)):
            if module is not pkg:
                self.on_package(pkg=module)
            for name in module.exports or ():
                _complete(module, str(name))


def _split(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


def _complete(module: griffe.Module, name: str) -> None:
    """Finds `name` where a module of the same name hides it, and describes it where it is a constant."""
    found = module.members.get(name)
    if isinstance(found, griffe.Module) and name in found.members:
        module.set_member(name, griffe.Alias(name, found.members[name], parent=module))
        return
    target = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(target, griffe.Attribute) and not target.docstring and target.lineno:
        lines = target.filepath.read_text().splitlines()[: target.lineno - 1]
        comment: list[str] = []
        while lines and lines[-1].startswith("# "):
            comment.insert(0, lines.pop()[2:])
        target.docstring = griffe.Docstring(" ".join(comment) or "A constant.", parent=target)
