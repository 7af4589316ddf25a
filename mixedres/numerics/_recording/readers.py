"""Search against the direction of evaluation: which arrays read an array, and which hide that it is not finite."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from mixedres.numerics._recording.frames import Place, Tensor

# Their results are right if an operand is infinite in place of a number beyond the range.
_SATURATING = {"select_n", "clamp", "max", "min", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"}
_SATURATING |= {
    "tanh",
    "logistic",
    "exp",
    "exp2",
    "expm1",
    "erf",
    "erfc",
    "atan",
    "sign",
    "sort",
    "select_and_scatter_add",
}
# They read a part of the operand; "" is the slice that an iteration of a scan reads.
_SATURATING |= {"", "slice", "dynamic_slice", "gather", "split", "dynamic_update_slice", "scatter"}
# They write into a mutable array, which is measured when it is read.
_SATURATING |= {"new_ref", "swap", "addupdate"}


def places(tensors: Iterable[Tensor]) -> list[Place]:
    """Returns every tensor in all iterations of the scans around it."""
    return [
        (tensor, index)
        for tensor in tensors
        for index in itertools.product(*(range(frame.length) for frame in tensor.frame.scans()))
    ]


def hidden(
    tensors: Sequence[Tensor], is_bad: Callable[[Place], bool], is_written: Callable[[Place], bool]
) -> list[tuple[Place, Place]]:
    """Returns pairs of an infinite array that was computed from finite arrays, and a finite array that it leads to.

    Infinities are hidden by an operation such as a division. Operations that are right for an infinite operand, such as
    tanh or a maximum, are left out.

    `is_written`: predicate of the infinite arrays that the program wrote, such as a mask, or was given.
    """
    bad = {place for place in places(tensors) if is_bad(place)}
    if not bad:
        return []
    read_by: dict[Place, list[Place]] = defaultdict(list)
    for place in places(tensors):
        for found in place[0].links(place[1]):
            read_by[found].append(place)
    pairs: dict[tuple[Tensor, Tensor], tuple[Place, Place]] = {}
    for origin in bad:
        if is_written(origin) or any(cause in bad for cause in origin[0].links(origin[1])):
            continue
        seen, queue = {origin}, [origin]
        while queue:
            for reader in read_by[queue.pop()]:
                if reader in bad and reader not in seen:
                    seen.add(reader)
                    queue.append(reader)
                elif reader not in bad and reader[0].primitive not in _SATURATING:
                    pairs.setdefault((origin[0], reader[0]), (origin, reader))
    return sorted(pairs.values(), key=lambda pair: pair[0][0].path)


def factors(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Returns the factors of derivatives that were computed in the forward pass, such as 0.5 / sqrt(x) for sqrt(x).

    Only the backward pass reads a factor, and the operation that is differentiated has the same source line.
    """
    read_by: dict[Tensor, list[Tensor]] = defaultdict(list)
    first_at: dict[str, Tensor] = {}
    for tensor in tensors:
        depth = len(tensor.frame.scans())
        first_at.setdefault(tensor.source, tensor)
        later = tuple(min(1, frame.length - 1) for frame in tensor.frame.scans())
        for found, _ in dict.fromkeys([*tensor.links((0,) * depth), *tensor.links(later)]):
            read_by[found].append(tensor)
    result: set[Tensor] = set()
    for tensor in reversed(tensors):
        readers = read_by[tensor]
        in_jvp = "jvp(" in tensor.scope and "transpose(" not in tensor.scope and tensor.source
        only_backward = all("transpose(" in reader.scope or reader in result for reader in readers)
        if in_jvp and readers and first_at[tensor.source] is not tensor and only_backward:
            result.add(tensor)
    return result
