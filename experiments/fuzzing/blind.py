"""Mutations of bytes that know nothing of their format."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Integers at the edges of their types.
EDGES = (
    0,
    1,
    -1,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
# Bytes beyond which a mutant does not grow.
MOST = 4_000_000


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    """The random numbers of one mutation: a function of the seed, the format and the mutation's number."""
    return np.random.default_rng([seed, *name.encode(), number])


def mutated(rng: np.random.Generator, data: bytes, other: bytes = b"") -> bytes:
    """`data` after one to four mutations, most often one; `other` is what blocks are spliced in from."""
    for _ in range(1 + int(rng.choice(4, p=(0.6, 0.2, 0.1, 0.1)))):
        mutation = MUTATIONS[rng.integers(len(MUTATIONS))]
        data = mutation(rng, data, other)[:MOST]
    return data


def _place(rng: np.random.Generator, data: bytes) -> int:
    """An offset: near the beginning in half of all draws, where headers are."""
    most = min(64, len(data)) if rng.random() < 0.5 else len(data)
    return int(rng.integers(most + 1))


def _block(rng: np.random.Generator, data: bytes) -> slice:
    start = _place(rng, data)
    return slice(start, start + int(rng.integers(1, max(2, min(len(data), 4096)))))


def flip_bits(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Flips one to eight bits."""
    flipped = bytearray(data)
    for _ in range(int(rng.integers(1, 9)) if data else 0):
        flipped[min(_place(rng, data), len(data) - 1)] ^= 1 << int(rng.integers(8))
    return bytes(flipped)


def replace_bytes(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Replaces a few bytes by random ones."""
    start, count = _place(rng, data), int(rng.integers(1, 17))
    return data[:start] + rng.bytes(len(data[start : start + count])) + data[start + count :]


def write_edge(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Writes an integer at the edge of a type, of 1 to 8 bytes, in either order of bytes."""
    width, order = (1, 2, 4, 8)[rng.integers(4)], ("little", "big")[rng.integers(2)]
    value = EDGES[rng.integers(len(EDGES))] % 2 ** (8 * width)
    start = _place(rng, data)
    return data[:start] + value.to_bytes(width, order) + data[start + width :]


def truncate(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Cuts the end off; one in eight times everything."""
    return b"" if rng.random() < 0.125 else data[: int(rng.integers(len(data) + 1))]


def delete(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Deletes a block."""
    block = _block(rng, data)
    return data[: block.start] + data[block.stop :]


def duplicate(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Repeats a block, up to 64 times."""
    block = _block(rng, data)
    times = int(2 ** rng.integers(1, 7))
    return data[: block.start] + data[block] * times + data[block.stop :]


def insert(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Inserts random bytes or one byte many times."""
    start, count = _place(rng, data), int(2 ** rng.integers(0, 12))
    new = rng.bytes(count) if rng.random() < 0.5 else bytes([int(rng.choice((0, 10, 32, 91, 255)))]) * count
    return data[:start] + new + data[start:]


def swap(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Exchanges two halves of a stretch."""
    start, middle, stop = sorted(int(rng.integers(len(data) + 1)) for _ in range(3))
    return data[:start] + data[middle:stop] + data[start:middle] + data[stop:]


def splice(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """The beginning of one file and the end of another."""
    other = other or data[::-1]
    return data[: int(rng.integers(len(data) + 1))] + other[int(rng.integers(len(other) + 1)) :]


MUTATIONS: tuple[Callable[[np.random.Generator, bytes, bytes], bytes], ...] = (
    flip_bits,
    replace_bytes,
    write_edge,
    truncate,
    delete,
    duplicate,
    insert,
    swap,
    splice,
)


def chance(rng: np.random.Generator, probability: float) -> bool:
    """Whether an event of this probability happens."""
    return bool(rng.random() < probability)


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    """One of a sequence, as it is."""
    return choices[int(rng.integers(len(choices)))]


def edge_field(rng: np.random.Generator, code: str) -> bytes:
    """An integer at the edge of a type as a field of this `struct` code of an unsigned type."""
    return struct.pack(code, pick(rng, EDGES) % 2 ** (8 * struct.calcsize(code)))
