"""Where in a program an operation stands: the calls and named scopes around it."""

from __future__ import annotations

import dataclasses

from mixedres.autocast import compat
from mixedres.autocast.compat import Equation


@dataclasses.dataclass(frozen=True)
class Scope:
    """The calls and named scopes around an operation.

    Attributes:
      path: all of them, for people: 'jvp(ResNet)/scan/jit(silu)'.
      names: the named scopes alone, which flax's modules open: ('ResNet', 'head').
    """

    path: str = ""
    names: tuple[str, ...] = ()

    def at(self, eqn: Equation) -> Scope:
        """That of an equation in a body that is called from here."""
        return Scope(_joined(self.path, compat.name_stack(eqn)), self.names + compat.named_scopes(eqn))

    def inside(self, label: str) -> Scope:
        """That of the body of a call."""
        return Scope(_joined(self.path, label), self.names)

    @property
    def modules(self) -> tuple[str, ...]:
        """`names` without those that flax opens for a method: ('norm1',) of ('norm1', 'norm1._average')."""
        found: list[str] = []
        for name in self.names:
            owner, dot, _ = name.partition(".")
            if not (dot and found and found[-1] == owner):
                found.append(name)
        return tuple(found)


def _joined(*parts: str) -> str:
    return "/".join(filter(None, parts))
