"""Taps on the modules of flax.linen without changes to their code; the only function of the package that needs flax."""

from collections.abc import Callable
from typing import Any, TypeVar

from mixedres._internal.types import PyTree
from mixedres.numerics.counting.taps import tap

T = TypeVar("T")


def tap_modules(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns `fn` with a tap on the result of every Linen module that it calls, named by its path: 'block1/conv2'.

    All calls of a module are one tap; methods other than `__call__` have none. The outermost module has a tap, with the
    name of its class, only if it contains no other module.
    """

    import flax.linen as nn

    def run(*args: PyTree, **kwargs: Any) -> T:
        inside = 0

        def interceptor(call: Callable[..., Any], args: PyTree, kwargs: Any, context: Any) -> Any:
            nonlocal inside
            before = inside
            result = call(*args, **kwargs)
            path = "/".join(context.module.path)
            if context.method_name != "__call__" or (not path and inside > before):
                return result
            inside += 1
            return tap(result, path or type(context.module).__name__)

        with nn.intercept_methods(interceptor):
            return fn(*args, **kwargs)

    return run
