"""`keep_float32`: operations that stay in float32 because a regular expression matches their path."""

import dataclasses
import re
from collections.abc import Iterable

from mixedres._internal import jax_compat
from mixedres._internal.errors import nearest
from mixedres._internal.jaxprs.module_paths import match_module
from mixedres._internal.types import Jaxpr
from mixedres.amp._graph import Graph, Scope


@dataclasses.dataclass(frozen=True)
class Keep:
    """Operations whose path matches a regular expression (`re.search`); an empty expression matches none.

    An expression that names a module, such as '^/head$', matches every operation in the module, whatever scopes and
    calls are around the operation inside the module. The expression is searched in three spellings of the path. One has
    the named scopes: '/ResNet/block_layer1_1'. One lacks the first scope, which is the class of the root module in
    flax: '/block_layer1_1'. One is the path in reports, with calls and derivatives: '/jvp(ResNet)/block_layer1_1/relu'.

    Raises:
      ValueError: for an invalid regular expression.
    """

    pattern: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"keep_float32 must be a regular expression such as '^/head$', got {self.pattern!r}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"keep_float32={self.pattern!r} is not a regular expression: {error}") from None


def reason_to_keep(keep: Keep, scope: Scope, body: Jaxpr = None) -> str:
    """Returns the reason why an operation at `scope`, or inside its `body`, stays in float32; '' if it need not."""
    if not keep.pattern:
        return ""
    names = scope.modules
    for path in ("/" + "/".join(names), "/" + "/".join(names[1:]), "/" + scope.path):
        if (found := match_module(keep.pattern, path)) is not None:
            return f"keep_float32: {keep.pattern!r} matches {found}"
    equations = () if body is None else jax_compat.opened(body)[0].eqns
    inside = ((scope.at(eqn), inner) for eqn in equations for inner in jax_compat.bodies(eqn) or (None,))
    return next(filter(None, (reason_to_keep(keep, *place) for place in inside)), "")


def check_match(keep: Keep, graphs: Iterable[Graph]) -> None:
    """Raises ValueError if the pattern is not empty and matches no operation on float32 in any of the graphs."""
    if not keep.pattern:
        return
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    if any(node.keep_float32 for node in nodes):
        return
    scopes = {node.scope.modules for node in nodes if node.touches_f32 and node.scope.names}
    paths = ["/" + "/".join(names[1:] or names) for names in scopes]
    raise ValueError(
        f"keep_float32={keep.pattern!r} matches the path of no operation on float32 values; "
        + (f"they look like {nearest(keep.pattern, paths)}" if paths else "none of them is in a jax.named_scope")
        + "; name a part of your own with jax.named_scope"
    )
