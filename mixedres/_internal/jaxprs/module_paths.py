"""Paths of modules, and regular expressions that name modules by their paths: `keep_float32`."""

import functools
import re
from collections.abc import Iterable


def modules(scopes: Iterable[str]) -> tuple[str, ...]:
    """Returns named scopes without the scopes of flax methods: ('norm1',) for ('norm1', 'norm1._average')."""
    found: list[str] = []
    for name in scopes:
        owner, dot, _ = name.partition(".")
        if not (dot and found and found[-1] == owner):
            found.append(name)
    return tuple(found)


def expression(path: str) -> str:
    """Returns the expression of the user's innermost scope, if any, and of all scopes inside."""
    # Equinox opens one scope, such as 'eqx.nn.Linear', for all modules of a class, and an einsum one for its equation.
    parts = path.split("/")
    own = [i for i, part in enumerate(parts) if "->" not in part and not part.startswith("eqx.")]
    return f"^/{re.escape('/'.join(parts[: own[-1] + 1] if own else parts))}(/|$)"


@functools.lru_cache(4096)
def match_module(pattern: str, path: str) -> str | None:
    """Returns the path that a regular expression matches: `path`, that of a module around it, or None."""
    # '^/head$' also matches what is in the module '/head', such as '/head/bi,io->bo', a scope that `jnp.einsum` opens.
    expression = re.compile(pattern)
    for end in (index for index, character in enumerate(path) if character == "/" and index > 0):
        if any(match.end() == end for match in expression.finditer(path[:end])):
            return path[:end]
    return path if expression.search(path) else None
