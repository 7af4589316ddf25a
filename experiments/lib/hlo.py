"""What an optimised GPU program does, read from its text: kernels by kind, the bytes each moves, dtypes."""

import dataclasses
import math
import re
from collections import Counter

# Bytes of an element; what is not here (tokens, opaque) moves none.
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_BYTES |= {"f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
# These move nothing.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction of the entry computation that runs on the device."""

    name: str  # of the instruction
    kind: str  # convolution, matmul, reduction, elementwise, pooling, transpose, copy, collective, other
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of what it reads and writes
    results: tuple[tuple[str, tuple[int, ...]], ...]
    target: str = ""  # of a custom call

    @property
    def bytes(self) -> int:
        """What it reads and writes, each operand and result once; scratch memory of a library's call is not counted."""
        has_scratch = self.target.startswith(("__cudnn", "__cublas")) and len(self.results) > 1
        results = self.results[:-1] if has_scratch else self.results
        return sum(size_in_bytes(*array) for array in (*self.operands, *results))


def size_in_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Of an array; 0 for what is none, such as a token."""
    return _BYTES.get(dtype, 0) * math.prod(shape)


def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(('f16', (2, 3)), ...) of 'f16[2,3]{1,0}' or of a tuple of such."""
    return tuple(
        (dtype, tuple(int(n) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
    )


def kernels(text: str) -> list[Kernel]:
    """The kernels of the entry computation of an optimised HLO module."""
    computations = _computations(text)
    entry = next(lines for name, lines in computations.items() if name.startswith("ENTRY"))
    shapes: dict[str, tuple] = {}
    found = []
    for line in entry:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, operation, rest = match.groups()
        shapes[name] = arrays(shape)
        if operation in _FREE or operation.endswith("-done"):
            continue
        names = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        operands = tuple(array for operand in names for array in shapes.get(operand, ()))
        target = re.search(r'custom_call_target="([^"]+)"', line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        body = computations.get(called[1], []) if called else []
        kind = _kind(operation, target[1] if target else "", body, line)
        found.append(Kernel(name, kind, operands, shapes[name], target[1] if target else ""))
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """{name: lines}; the entry's name begins with ENTRY."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start:
            current = found.setdefault((start[1] or "") + start[2], [])
        elif line.startswith(" "):
            current.append(line)
    return found


def _kind(operation: str, target: str, body: list[str], line: str) -> str:
    operations = Counter(match[3] for inner in body if (match := _INSTRUCTION.match(inner)))
    if target.startswith("__cudnn$conv") or operation == "convolution" or operations["convolution"]:
        return "convolution"
    if target.startswith("__cublas") or operation == "dot" or operations["dot"] or "gemm" in line.partition("=")[0]:
        return "matmul"
    if operation.startswith(("all-reduce", "all-gather", "reduce-scatter", "collective")):
        return "collective"
    pooling = ("reduce-window", "select-and-scatter", "scatter")
    if operation in pooling or any(operations[name] for name in pooling):
        return "pooling"
    if operation in ("reduce", "reduce-precision") or operations["reduce"]:
        return "reduction"
    if operation == "copy" or (operations["copy"] and len(operations - Counter(_FREE)) <= 3):
        return "copy"
    if operation == "transpose" or operations["transpose"]:
        return "transpose"
    return "elementwise" if operation == "fusion" else "other"
