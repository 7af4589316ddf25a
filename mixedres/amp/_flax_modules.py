"""Changes of Flax modules during tracing: they reach the caller, or the function is refused. Imports no flax."""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mixedres._internal.types import Array, PyTree


class Arguments:
    """Arguments of a call as `leaves`; an nnx module is replaced by its state, as in `nnx.jit`."""

    def __init__(self, args: PyTree, kwargs: Any) -> None:
        self._nnx: Any = sys.modules.get("flax.nnx")
        places, self._tree = jax.tree.flatten((args, kwargs), is_leaf=self._is_module)
        self._is_place = [not self._is_module(place) for place in places]
        others = list(itertools.compress(places, self._is_place))
        self._modules = tuple(filter(self._is_module, places))
        self._graph: Any = None
        state: Any = ()
        if self._nnx is not None and self._modules:
            self._graph, state = self._nnx.split(self._modules)
        self.leaves, self._structure = jax.tree.flatten((others, state))
        self._changed: list[tuple[Any, Any]] = []

    def _is_module(self, value: object) -> bool:
        return self._nnx is not None and isinstance(value, self._nnx.Pytree | self._nnx.Variable)

    def apply(self, fn: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Calls `fn` with other leaves; returns its results and the changes of nnx modules, if none would be lost."""
        others, state = jax.tree.unflatten(self._structure, leaves)
        copies = self._nnx.merge(self._graph, state) if self._modules else ()
        remaining, modules = iter(others), iter(copies)
        places = [next(remaining) if is_place else next(modules) for is_place in self._is_place]
        args, kwargs = jax.tree.unflatten(self._tree, places)
        results = fn(*args, **kwargs)
        self._check_others((args, kwargs), others)
        _, before = jax.tree.unflatten(self._structure, leaves)  # `copies` has the variables of `state` themselves
        return results, self._changes(copies, before)

    def _check_others(self, arguments: Any, others: Sequence[Any]) -> None:
        given = {id(leaf) for leaf in others}
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=self._is_module):
            if isinstance(leaf, jax.core.Tracer) and id(leaf) not in given:
                where = jax.tree_util.keystr(path[1:])
                raise TypeError(
                    f"the function changes its argument {where}, which under autocast, as under jax.jit, is a copy; "
                    "return the new value instead"
                )

    def _changes(self, copies: Any, before: Any) -> list[Any]:
        if not copies:
            return []
        graph, after = self._nnx.split(copies)
        if graph != self._graph:
            raise TypeError(
                "the function changes the structure of an nnx module (an attribute or a new variable), which autocast "
                "cannot carry over; use nnx.split outside and nnx.merge inside, and return what changes"
            )
        arrays = []
        pairs = zip(self._nnx.to_flat_state(before), self._nnx.to_flat_state(after), strict=True)
        for (path, old), (_, new) in pairs:
            leaves, structure = jax.tree.flatten(new)
            if any(a is not b for a, b in zip(jax.tree.leaves(old), leaves, strict=True)):
                self._changed.append((path, structure))
                arrays += leaves
        return arrays

    def update(self, arrays: Sequence[Array]) -> None:
        """Writes changes that `apply` returned, as computed arrays, into the modules of the caller."""
        if self._changed:
            remaining = iter(arrays)
            flat = [
                (path, jax.tree.unflatten(s, [next(remaining) for _ in range(s.num_leaves)]))
                for path, s in self._changed
            ]
            self._nnx.update(self._modules, self._nnx.from_flat_state(flat))


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Surrounds a trace; raises TypeError if it wrote tracers into the module of flax.linen around it."""
    # The module of flax.linen whose method is running.
    context = getattr(getattr(sys.modules.get("flax.linen"), "module", None), "_context", None)
    around = context.module_stack[-1] if context is not None else None
    before = {id(leaf): leaf for leaf in jax.tree.leaves(around.variables)} if around is not None else {}
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # flax's, which nnx raises
            error.add_note(
                "autocast traces the function, as jax.jit does: pass nnx modules that it changes as arguments"
            )
        raise
    if around is None:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(around.variables):
        if id(leaf) not in before and isinstance(leaf, jax.core.Tracer):
            name = "/".join(str(key.key) for key in path)
            raise TypeError(
                f"the function under autocast creates or changes {name} of the {type(around).__name__} around it, "
                "which would stay a tracer; use autocast(model.apply) on the whole network"
            )
