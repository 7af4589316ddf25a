"""Operations that stay in float32 because of where they stand: `keep_float32`, searched in their paths."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any

from mixedres._internal import jax_compat
from mixedres.autocast.graph import Graph, Scope


@dataclasses.dataclass(frozen=True)
class Keep:
    """The operations in whose path the regular expression `pattern` is found; none where it is empty.

    It is searched in three spellings of the path: the named scopes, '/ResNet/block_layer1_1'; these without the first,
    which is the class of the root module in flax, '/block_layer1_1'; and what `explain` prints, with calls and
    derivatives, '/jvp(ResNet)/block_layer1_1/relu'.

    Raises:
      ValueError: for what is no regular expression.
    """

    pattern: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"keep_float32 must be a regular expression such as '^/head$', got {self.pattern!r}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"keep_float32={self.pattern!r} is no regular expression: {error}") from None

    def reason(self, scope: Scope, body: Any = None) -> str:
        """Why what stands at `scope`, or in a body that is called there, stays in float32; '' if it does not."""
        if not self.pattern:
            return ""
        for path in _spellings(scope):
            if re.search(self.pattern, path):
                return f"keep_float32: {self.pattern!r} is found in {path}"
        equations = () if body is None else jax_compat.opened(body)[0].eqns
        inside = ((scope.at(eqn), inner) for eqn in equations for inner in jax_compat.bodies(eqn) or (None,))
        return next(filter(None, (self.reason(*place) for place in inside)), "")

    def check(self, graph: Graph) -> None:
        """Raises ValueError where there is a pattern, and nothing on float32 that it keeps."""
        if not self.pattern or any(node.kept for node in graph.all_nodes()):
            return
        scopes = {node.scope.modules for node in graph.all_nodes() if node.touches_f32 and node.scope.names}
        paths = ["/" + "/".join(names[1:] or names) for names in scopes]
        raise ValueError(
            f"keep_float32={self.pattern!r} is found in the path of no operation on float32 values; "
            + (f"they look like {nearest(self.pattern, paths)}" if paths else "none of them is in a jax.named_scope")
        )


def nearest(pattern: str, paths: Iterable[str]) -> str:
    """'/head, /stem_conv and /block_layer1_1': those of `paths` that are most like `pattern`."""
    *most, last = difflib.get_close_matches(pattern.strip("^$"), sorted(set(paths)), n=3, cutoff=0.0)
    return f"{', '.join(most)} and {last}" if most else last


def _spellings(scope: Scope) -> tuple[str, ...]:
    names = scope.modules
    return "/" + "/".join(names), "/" + "/".join(names[1:]), "/" + scope.path
