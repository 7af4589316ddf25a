"""Taps of the modules of flax's Linen, whose code stays as it is; the only file here that needs flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn

from mixedres.numerics.taps import tap

T = TypeVar("T")


def tapped(fn: Callable[..., T]) -> Callable[..., T]:
    """`fn` with a tap of the result of every Linen module that it calls, named by its path: 'block1/conv2'.

    A module that is called twice is one tap. Of a module's methods only `__call__` is tapped. The outermost module
    returns what its last one does and is left out, unless it contains no other; then it goes by its class's name.
    """

    def run(*args: Any, **kwargs: Any) -> T:
        inside = 0

        def interceptor(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
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
