"""Mutations of bytes that know nothing of their format."""

import struct

import numpy as np

# Integers at the edges of their types.
EDGES = (0, 1, -1, 127, 128, 255, 2**15, 2**16 - 1, 2**24)
EDGES += (2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# Bytes beyond which a mutant does not grow.
MOST = 4_000_000


def generator(seed, name, number):
    """Returns the random numbers of one mutation: a function of the seed, the format and the mutation's number."""
    return np.random.default_rng([seed, *name.encode(), number])


def chance(rng, probability):
    """Returns whether an event of this probability happens."""
    return bool(rng.random() < probability)


def pick(rng, choices):
    """Returns one of a sequence, as it is."""
    return choices[int(rng.integers(len(choices)))]


def edge_field(rng, code):
    """Returns an integer at the edge of a type as a field of this `struct` code of an unsigned type."""
    return struct.pack(code, pick(rng, EDGES) % 2 ** (8 * struct.calcsize(code)))


def mutated(rng, data, other=b""):
    """Returns `data` after one to four mutations, most often one; `other` is what blocks are spliced in from."""
    for _ in range(1 + int(rng.choice(4, p=(0.6, 0.2, 0.1, 0.1)))):
        data = pick(rng, MUTATIONS)(rng, data, other)[:MOST]
    return data


def _place(rng, data):
    """Returns an offset: near the beginning in half of all draws, where headers are."""
    return int(rng.integers(1 + (min(64, len(data)) if rng.random() < 0.5 else len(data))))


def _block(rng, data):
    """Returns (what is before a block, the block, what is after it)."""
    start = _place(rng, data)
    stop = start + int(rng.integers(1, max(2, min(len(data), 4096))))
    return data[:start], data[start:stop], data[stop:]


def flip_bits(rng, data, other):
    flipped = bytearray(data)
    for _ in range(int(rng.integers(1, 9)) if data else 0):
        flipped[min(_place(rng, data), len(data) - 1)] ^= 1 << int(rng.integers(8))
    return bytes(flipped)


def replace_bytes(rng, data, other):
    start, count = _place(rng, data), int(rng.integers(1, 17))
    return data[:start] + rng.bytes(len(data[start : start + count])) + data[start + count :]


def write_edge(rng, data, other):
    """Writes an integer at the edge of a type, of 1 to 8 bytes, in either order of bytes."""
    start, field = _place(rng, data), edge_field(rng, pick(rng, "<>") + pick(rng, "BHIQ"))
    return data[:start] + field + data[start + len(field) :]


def truncate(rng, data, other):
    """Cuts the end off; one in eight times everything."""
    return b"" if rng.random() < 0.125 else data[: int(rng.integers(len(data) + 1))]


def delete(rng, data, other):
    before, _, after = _block(rng, data)
    return before + after


def duplicate(rng, data, other):
    """Repeats a block, up to 64 times."""
    before, block, after = _block(rng, data)
    return before + block * int(2 ** rng.integers(1, 7)) + after


def insert(rng, data, other):
    """Inserts random bytes, or one byte many times."""
    start, count = _place(rng, data), int(2 ** rng.integers(0, 12))
    new = rng.bytes(count) if rng.random() < 0.5 else bytes([pick(rng, (0, 10, 32, 91, 255))]) * count
    return data[:start] + new + data[start:]


def swap(rng, data, other):
    """Exchanges two parts that follow each other."""
    start, middle, stop = sorted(int(rng.integers(len(data) + 1)) for _ in range(3))
    return data[:start] + data[middle:stop] + data[start:middle] + data[stop:]


def splice(rng, data, other):
    """Joins the beginning of one file and the end of another."""
    other = other or data[::-1]
    return data[: int(rng.integers(len(data) + 1))] + other[int(rng.integers(len(other) + 1)) :]


MUTATIONS = (flip_bits, replace_bytes, write_edge, truncate, delete, duplicate, insert, swap, splice)
