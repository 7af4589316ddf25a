"""Which tensors the products of a function multiply: read from its graph, by the names of taps and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mixedres._internal import jax_compat
from mixedres._internal.jax_compat import Equation
from mixedres._internal.tree import leaves_by_path
from mixedres.numerics import taps
from mixedres.numerics.rows import Kind

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True)
class Product:
    """The products in one named scope.

    Attributes:
      path: the scope, 'block0/dense', without the first name if all products of the function share it; '' for none.
      operands: (kind, name) of the tensors that they multiply, in either direction: values and weights, and the
        gradients of their results.
    """

    path: str
    operands: tuple[tuple[Kind, str], ...]


class _Source(NamedTuple):
    """Where the numbers of an array come from: a tap, a parameter or a product (then `name` is its path)."""

    kind: str
    name: str


_Sources = frozenset[_Source]


def products(fn: Callable[..., Any], params: Any, *args: Any) -> tuple[Product, ...]:
    """The products of ``fn(params, *args)`` in the order of execution; only traces `fn`.

    An operand is what was tapped last on the way to it: operations in between, such as an activation function, are not
    looked at. A parameter is one only if it comes unchanged, or cast, sliced or transposed.

    Args:
      fn: any function with taps in it.
      params: a pytree of arrays or their shapes, named by their paths as in `examine`.
      *args: the other arguments.
    """
    named = [_Source("parameter", path or "params") for path, _ in leaves_by_path(params)]
    jaxpr = taps.marked_jaxpr(fn, params, *args)
    walk = _Walk({})
    invars = jax_compat.opened(jaxpr)[0].invars
    nothing: list[_Sources] = [frozenset()] * (len(invars) - len(named))
    walk.body(jaxpr, [*(frozenset([source]) for source in named), *nothing], ())
    paths = [path.split("/") for path in walk.found if path]
    shared = len({first for first, *_ in paths}) == 1 and all(len(path) > 1 for path in paths)
    return tuple(
        Product(path.partition("/")[2] if shared else path, tuple(operands)) for path, operands in walk.found.items()
    )


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Follows the sources of arrays through a graph, and collects the operands of products by path."""

    found: dict[str, dict[tuple[Kind, str], None]]

    def body(self, jaxpr: Any, args: Sequence[_Sources], scopes: tuple[str, ...]) -> list[_Sources]:
        """The sources of the results of a jaxpr that is called inside `scopes`."""
        nothing: _Sources = frozenset()
        consts = [nothing] * len(jax_compat.opened(jaxpr)[0].constvars)

        def equation(_: int, eqn: Equation, operands: list[_Sources]) -> Sequence[_Sources]:
            return self.equation(eqn, operands, scopes + jax_compat.named_scopes(eqn))

        return jax_compat.interpret(jaxpr, consts, args, equation, literal=lambda _: nothing)

    def equation(self, eqn: Equation, operands: list[_Sources], scopes: tuple[str, ...]) -> Sequence[_Sources]:
        """The sources of the results of an equation."""
        name, body = eqn.primitive.name, jax_compat.body(eqn)
        if (tapped := taps.name_of_mark(eqn)) is not None:
            for source in operands[0]:
                if source.kind == "product":
                    self.found[source.name][("gradient", tapped)] = None
            return [frozenset([_Source("activation", tapped)])]
        if name in _PRODUCTS:
            return [frozenset([self._product("/".join(jax_compat.modules_of(scopes)), operands)])]
        if name == "scan":
            return self._loop(body, operands, *jax_compat.scan_arity(eqn.params), scopes)
        if name == "while":
            first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carried, body = operands[first + consts :], eqn.params["body_jaxpr"]
            results = self._loop(body, operands[first:], consts, len(carried), scopes)
            # It may do nothing.
            return [before | after for before, after in zip(carried, results, strict=True)]
        if name == "cond":
            ends = [self.body(branch, operands[1:], scopes) for branch in eqn.params["branches"]]
            return [frozenset().union(*sources) for sources in zip(*ends, strict=True)]
        if body is not None and len(jax_compat.opened(body)[0].invars) == len(operands):
            return self.body(body, operands, scopes)
        mixed = frozenset().union(*operands)
        if len(operands) > 1:
            mixed = frozenset(source for source in mixed if source.kind != "parameter")
        return [mixed] * len(eqn.outvars)

    def _product(self, path: str, operands: list[_Sources]) -> _Source:
        kinds: dict[str, Kind] = {"activation": "activation", "parameter": "parameter"}
        found = self.found.setdefault(path, {})
        for source in (source for operand in operands[:2] for source in sorted(operand) if source.kind in kinds):
            found[kinds[source.kind], source.name] = None
        return _Source("product", path)

    def _loop(
        self, body: Any, operands: Sequence[_Sources], consts: int, carry: int, scopes: tuple[str, ...]
    ) -> list[_Sources]:
        """The sources of the results of a loop whose operands are constants, what it carries, and slices."""
        carried = list(operands[consts : consts + carry])
        while True:
            results = self.body(body, [*operands[:consts], *carried, *operands[consts + carry :]], scopes)
            wider = [before | after for before, after in zip(carried, results[:carry], strict=True)]
            if wider == carried:
                return results
            carried = wider
