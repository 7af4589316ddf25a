"""Kernels of an optimized GPU program, read from its text: their kinds, bytes and dtypes, and the all-reduces."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

# Bytes of an element; what is not here (tokens, opaque) moves none.
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_BYTES |= {"f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
# These move nothing.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_SLICES = {"slice", "dynamic-slice"}
_POINTWISE = {"bitcast", "convert", "add", "subtract", "multiply", "divide", "negate", "maximum", "compare", "select"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective")

Arrays = tuple[tuple[str, tuple[int, ...]], ...]  # ((dtype, shape), ...)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction of the entry computation that runs on the device."""

    name: str  # of the instruction
    kind: str  # convolution, matmul, reduction, elementwise, pooling, transpose, copy, slice, collective, other
    operands: Arrays  # what it reads: of an operand of which it takes slices alone, these slices
    results: Arrays
    target: str = ""  # of a custom call

    @property
    def bytes(self) -> int:
        """What it reads and writes, each operand and result once; scratch memory of a library's call is not counted."""
        has_scratch = self.target.startswith(("__cudnn", "__cublas")) and len(self.results) > 1
        results = self.results[:-1] if has_scratch else self.results
        return _bytes(self.operands + results)


def size_in_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Of an array; 0 for what is none, such as a token."""
    return _BYTES.get(dtype, 0) * math.prod(shape)


def arrays(shape: str) -> Arrays:
    """(('f16', (2, 3)), ...) of 'f16[2,3]{1,0}' or of a tuple of such."""
    return tuple(
        (dtype, tuple(int(n) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
    )


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of an optimised HLO module in the order in which they run, of loops for every step."""
    computations = _computations(text)
    return list(_kernels(_entry(computations), computations))


def _kernels(lines: list[str], computations: dict[str, list[str]]) -> Iterator[Kernel]:
    shapes: dict[str, Arrays] = {}
    for line, (name, shape, operation, rest) in _instructions(lines):
        shapes[name] = results = arrays(shape)
        if operation in _FREE or operation.endswith("-done"):
            continue
        if operation == "while" and (steps := re.search(r'"known_trip_count":\{"n":"(\d+)"', line)):
            body = re.search(r"body=%?([\w.\-]+)", line)
            yield from int(steps[1]) * list(_kernels(computations[body[1]] if body else [], computations))
            continue
        target = re.search(r'custom_call_target="([^"]+)"', line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        body_lines = computations.get(called[1], []) if called else []
        operands = [shapes.get(operand, ()) for operand in _operands(rest)]
        if operation == "fusion-start":  # its shape is ((operands), results, ...)
            operation, results = "fusion", results[len(sum(operands, ())) :]
        for index, taken in _slices(body_lines).items() if operation == "fusion" else ():
            operands[index] = min(taken, operands[index], key=_bytes)  # slices can overlap
        if operation in _SLICES:
            operands[0] = shapes[name]
        if operation == "fusion" and (updated := _updates(body_lines)):
            operands, results = _updated(operands, results, updated)
        kind = _kind(operation, target[1] if target else "", body_lines, line)
        yield Kernel(name, kind, sum(operands, ()), results, target[1] if target else "")


@dataclasses.dataclass
class Collective:
    """An all-reduce, or another sum or exchange between devices, with its place in the order of the kernels."""

    operation: str  # all-reduce, ...
    dtypes: list[str]  # sorted
    arrays: int  # number of its operands
    bytes: int  # of its operands
    is_async: bool  # kernels run until its result is asked for
    start: float  # fraction of the bytes of the program's kernels that are moved before it starts
    hidden: int = 0  # bytes of the kernels that run between its start and its end


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of the entry computation of an optimised HLO module, in the order in which they start."""
    moved = {kernel.name: kernel.bytes for kernel in kernels(text) if kernel.kind != "collective"}
    total = max(sum(moved.values()), 1)
    found: dict[str, tuple[Collective, int]] = {}
    shapes: dict[str, Arrays] = {}
    passed = 0
    for line, (name, shape, operation, rest) in _instructions(_entry(_computations(text))):
        shapes[name] = arrays(shape)
        passed += moved.get(name, 0)
        if not operation.startswith(_COLLECTIVES):
            continue
        if operation.endswith("-done"):
            begun, before = found[_operands(rest)[0]]
            begun.hidden = passed - before
        else:
            given = sum((shapes.get(operand, ()) for operand in _operands(rest)), ())
            is_async = operation.endswith("-start") and '"is_sync":true' not in line
            kind, dtypes = operation.removesuffix("-start"), sorted({dtype for dtype, _ in given})
            found[name] = Collective(kind, dtypes, len(given), _bytes(given), is_async, passed / total), passed
    return [collective for collective, _ in found.values()]


def _bytes(given: Arrays) -> int:
    return sum(size_in_bytes(*array) for array in given)


def _entry(computations: dict[str, list[str]]) -> list[str]:
    return next(lines for name, lines in computations.items() if name.startswith("ENTRY"))


def _instructions(lines: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields every line that is an instruction, with its name, shape, operation, and what comes after '('."""
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match:
            yield line, match.groups()


def _operands(rest: str) -> list[str]:
    """Returns the names of the operands, from what comes after the '(' of an instruction."""
    return re.findall(r"%([\w.\-]+)", rest.split("), ")[0])


def _slices(body: list[str]) -> dict[int, Arrays]:
    """Returns {index of a parameter: its slices} of the parameters of which a fusion takes slices alone.

    A fusion computes the elements that are read and no others, so a slice of a product takes slices of the factors.
    """
    sources: dict[str, set[int]] = {}  # the parameters with the elements of which a value has its elements
    dtypes: dict[int, str] = {}
    taken: dict[int, Arrays] = {}
    whole: set[int] = set()
    for line, (name, shape, operation, rest) in _instructions(body):
        result = arrays(shape)
        if operation == "parameter":
            index = int(rest.partition(")")[0])
            sources[name], dtypes[index] = {index}, result[0][0]
            continue
        first, *others = [sources.get(operand, set()) for operand in _operands(rest)] or [set()]
        if operation in _SLICES:
            for index in first:
                taken[index] = (*taken.get(index, ()), (dtypes[index], result[0][1]))
            whole.update(*others)
        elif operation in _POINTWISE and "ROOT" not in line:
            sources[name] = first.union(*others)
        else:
            whole.update(first, *others)
    return {index: slices for index, slices in taken.items() if index not in whole}


def _updates(body: list[str]) -> list[tuple[int, Arrays]]:
    """Returns (index of the parameter, the part that is written) of the arrays that a fusion updates in place."""
    found, parameters, shapes = [], {}, {}
    for _, (name, shape, operation, rest) in _instructions(body):
        shapes[name] = arrays(shape)
        if operation == "parameter":
            parameters[name] = int(rest.partition(")")[0])
        elif operation == "bitcast" and _operands(rest)[0] in parameters:
            parameters[name] = parameters[_operands(rest)[0]]
        elif operation == "dynamic-update-slice" and (whole := _operands(rest)[0]) in parameters:
            found.append((parameters[whole], shapes[_operands(rest)[1]]))
    return found


def _updated(operands: list[Arrays], results: Arrays, updates: list[tuple[int, Arrays]]) -> tuple[list[Arrays], Arrays]:
    """Returns operands and results with only the parts of arrays that are updated in place; these are not read."""
    kept, left = list(operands), list(results)
    for index, part in updates:
        for array in kept[index]:
            if array in left:
                left[left.index(array)] = part[0]
        kept[index] = ()
    return kept, tuple(left)


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
    if operation.startswith(_COLLECTIVES):
        return "collective"
    if operation in _SLICES or (operations.keys() - _FREE and operations.keys() - _FREE <= _SLICES):
        return "slice"
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
