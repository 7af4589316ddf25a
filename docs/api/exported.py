"""An extension of griffe, which reads the docstrings of the API reference.

It handles three habits of this code: a function named as its module (`mixedres.amp.explain`), a constant whose
description is the comment above it, and a default that is a constant (`INITIAL_LOSS_SCALE`), which is shown as its
value. A public constant without a comment ends a strict build, and so does a docstring entry for several names.
"""

from __future__ import annotations

import importlib
import logging
import pathlib
import re
from typing import Any

import griffe

LOG = logging.getLogger("mkdocs.plugins.exported")  # a warning ends a strict build
SEVERAL = re.compile(r"^ +\w+(?:, \w+)+: ", re.MULTILINE)
PAGES = pathlib.Path(__file__).parent.glob("*.md")
DOCUMENTED = {name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}


class Exported(griffe.Extension):
    """Corrects what was read of a package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Completes the exported names of the packages that have a page."""
        for module in (m for m in pkg.modules.values() if not m.is_alias):
            self.on_package(pkg=module)
        if pkg.path in DOCUMENTED:
            for name in pkg.exports or ():
                _complete(pkg, str(name))


def _complete(module: griffe.Module, name: str) -> None:
    """Finds `name` where a module of the same name hides it, and describes it."""
    found = module.members.get(name)
    if isinstance(found, griffe.Module) and name in found.members:
        module.set_member(name, griffe.Alias(name, found.members[name], parent=module))
        found = found.members[name]
    target = found.final_target if isinstance(found, griffe.Alias) else found
    if target.docstring and SEVERAL.search(target.docstring.value):
        LOG.warning("%s: an entry of the docstring has several names; write one line for each", target.path)
    if isinstance(target, griffe.Attribute) and not target.docstring and target.lineno:
        _describe(target, module)
    if isinstance(target, griffe.Class):  # fields may be those of another class of the module
        for member in (m for owner in target.module.classes.values() for m in owner.members.values()):
            _show_value(member)


def _describe(target: griffe.Attribute, module: griffe.Module) -> None:
    """Gives a constant the comment above it as its docstring."""
    lines = target.filepath.read_text().splitlines()[: target.lineno - 1]
    comment: list[str] = []
    while lines and lines[-1].startswith("# "):
        comment.insert(0, lines.pop()[2:])
    if not comment:
        LOG.warning("%s: no comment above this public constant; write what it is", target.path)
    target.docstring = griffe.Docstring(" ".join(comment), parent=module)


def _show_value(member: griffe.Object | griffe.Alias) -> None:
    """Replaces the default of a field that is a constant of its module, or an array of zeros, by its value."""
    if isinstance(member, griffe.Attribute) and member.value is not None:
        default = re.sub(r"(?:dataclasses\.)?field\(default_factory=_zero\)", "0", str(member.value))
        if re.fullmatch(r"[A-Z_]+", default):
            default = repr(getattr(importlib.import_module(member.module.path), default))
        if default != str(member.value):
            member.value = default
