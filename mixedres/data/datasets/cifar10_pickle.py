"""The batches of CIFAR-10 that Python pickled, read without unpickling: what they hold is data, whatever they ask for.

A pickle is a program for a stack machine. This one knows only the instructions that make strings, numbers, lists,
tuples and dictionaries, and recognizes the calls that NumPy has in them for an array; it calls nothing.
"""

import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

# What the pickles of arrays call: by numpy 1 and 2, and how Python 3 writes bytes for Python 2.
_ARRAY, _DTYPE, _KIND = "an array", "a dtype", "numpy.ndarray"
_CALLS = {
    "numpy.core.multiarray _reconstruct": _ARRAY,
    "numpy._core.multiarray _reconstruct": _ARRAY,
    "numpy dtype": _DTYPE,
    "numpy ndarray": _KIND,
    "_codecs encode": "bytes",
}
_MARK = object()


class _Array:
    """An array as its pickle describes it."""

    def __init__(self) -> None:
        self.shape: Any = None
        self.dtype: Any = None
        self.data: Any = None


def read(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The arrays b'data' and b'labels' of a pickled batch: uint8 of any shape, and int64 or uint8.

    Raises:
      ValueError: for anything else, in words that follow "is not a batch of CIFAR-10".
    """
    held = _run(data)
    if not isinstance(held, dict) or not {b"data", b"labels"} <= held.keys():
        raise ValueError("it holds no data and labels")
    return _pixels(held[b"data"]), _labels(held[b"labels"])


def _pixels(found: Any) -> np.ndarray:
    if not isinstance(found, _Array) or found.dtype not in (b"u1", b"|u1"):
        raise ValueError("its data are no array of bytes")
    shape, data = found.shape, found.data
    is_shape = isinstance(shape, tuple) and all(type(side) is int and 0 <= side < 2**32 for side in shape)
    if not is_shape or not isinstance(data, bytes) or len(shape) != 2 or shape[0] * shape[1] != len(data):
        raise ValueError("its data are no whole array")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _labels(found: Any) -> np.ndarray:
    if not isinstance(found, list) or not all(type(label) is int and 0 <= label < 256 for label in found):
        raise ValueError("its labels are no list of small numbers")
    return np.array(found, np.int64)


def _run(data: bytes) -> Any:
    """What the pickle leaves on its stack."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in _CONSTANTS:
                stack.append(_CONSTANTS[name](argument))
            elif name in _CHANGES:
                _CHANGES[name](stack)
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name not in ("PROTO", "FRAME", "STOP"):
                raise ValueError(f"it has the instruction {name}")
    except (IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError("it is no whole pickle") from error
    (last,) = stack or [None]
    return last


def _text(argument: Any) -> bytes:
    """A string of Python 2, which pickletools decodes, or of Python 3."""
    return argument if isinstance(argument, bytes) else argument.encode("latin-1", errors="replace")


def _called(name: str) -> str:
    if name not in _CALLS:
        raise ValueError(f"it asks for {name.replace(' ', '.')}")
    return _CALLS[name]


def _from_mark(stack: list[Any]) -> list[Any]:
    """Takes everything above the newest mark off the stack."""
    above = next((index for index, value in enumerate(reversed(stack)) if value is _MARK), None)
    if above is None:
        raise IndexError
    place = len(stack) - 1 - above
    taken = stack[place + 1 :]
    del stack[place:]
    return taken


def _append_all(stack: list[Any]) -> None:
    taken = _from_mark(stack)
    _as(list, stack[-1]).extend(taken)


def _append(stack: list[Any]) -> None:
    value = stack.pop()
    _as(list, stack[-1]).append(value)


def _set_all(stack: list[Any]) -> None:
    taken = _from_mark(stack)
    held = _as(dict, stack[-1])
    for key, value in zip(taken[::2], taken[1::2], strict=True):
        held[_as(bytes, key)] = value


def _set(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    _as(dict, stack[-1])[_as(bytes, key)] = value


def _call(stack: list[Any]) -> None:
    """An array or dtype that is not filled yet, or bytes."""
    arguments, called = _as(tuple, stack.pop()), stack.pop()
    if called == "bytes":
        stack.append(_as(bytes, arguments[0]))
    elif called == _ARRAY:
        stack.append(_Array())
    elif called == _DTYPE:
        stack.append(_as(bytes, arguments[0]))  # its name, which says all that is wanted of it
    else:
        raise ValueError("it makes something else than an array")


def _build(stack: list[Any]) -> None:
    """Fills an array; the rest of a dtype does not matter."""
    state = _as(tuple, stack.pop())
    if isinstance(stack[-1], _Array):
        _, stack[-1].shape, stack[-1].dtype, _, stack[-1].data = state


def _tuple(count: int) -> Callable[[list[Any]], None]:
    def make(stack: list[Any]) -> None:
        if len(stack) < count:
            raise IndexError
        taken = tuple(stack[-count:])
        del stack[-count:]
        stack.append(taken)

    return make


def _global(stack: list[Any]) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_called(f"{_as(bytes, module).decode()} {_as(bytes, name).decode()}"))


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "MARK": lambda _: _MARK,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "GLOBAL": _called,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "INT", "LONG1"), lambda argument: argument),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"), _text),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"), _text),
}
_CHANGES: dict[str, Callable[[list[Any]], None]] = {
    "APPEND": _append,
    "APPENDS": _append_all,
    "SETITEM": _set,
    "SETITEMS": _set_all,
    "TUPLE": lambda stack: stack.append(tuple(_from_mark(stack))),
    "LIST": lambda stack: stack.append(_from_mark(stack)),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "REDUCE": _call,
    "BUILD": _build,
    "STACK_GLOBAL": _global,
}
