"""Mutations of bytes that know nothing of their format, and the random choices of all mutations."""

import struct

import numpy as np

# Integers at the edges of their types.
EDGES = (0, 1, -1, 127, 128, 255, 2**15, 2**16 - 1, 2**24)
EDGES += (2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# Bytes beyond which a mutant does not grow.
MOST = 4_000_000


def generator(seed, name, number):
    """Returns the random numbers of one mutant: a function of the seed, the format's name and the mutant's number."""
    return np.random.default_rng([seed, *name.encode(), number])


def chance(rng, probability):
    """Returns whether an event of this probability happens."""
    return bool(rng.random() < probability)


def pick(rng, choices):
    """Returns one element of a sequence, with its type unchanged."""
    return choices[int(rng.integers(len(choices)))]


def edge_field(rng, code):
    """Returns an integer at the edge of a type as a field of this `struct` code of an unsigned type."""
    return struct.pack(code, pick(rng, EDGES) % 2 ** (8 * struct.calcsize(code)))


def mutated(rng, data, other=b""):
    """Returns `data` after one to four mutations, most often one; `other` is a file to copy blocks from."""
    for _ in range(pick(rng, (1, 1, 1, 1, 1, 1, 2, 2, 3, 4))):
        data = once(rng, data, other, pick(rng, list(MUTATIONS)))
    return data


def once(rng, data, other, kind):
    """Returns `data` after the mutation `kind` at a random place; a third of the places are near the beginning."""
    start = int(rng.integers(1 + min(len(data), pick(rng, (1, 64, 64, len(data), len(data), len(data))))))
    stop = start + int(rng.integers(1, max(2, min(len(data), 4096))))
    return (data[:start] + MUTATIONS[kind](rng, data[start:stop], data[stop:], other or data[::-1]))[:MOST]


def _flipped(rng, block):
    bits = np.unpackbits(np.frombuffer(block, np.uint8))
    if bits.size:
        bits[rng.integers(bits.size, size=rng.integers(1, 9))] ^= 1
    return np.packbits(bits).tobytes()


# What a mutation makes of a block and the rest of the file behind the block.
MUTATIONS = {
    "flip bits": lambda rng, block, rest, other: _flipped(rng, block) + rest,
    "replace bytes": lambda rng, block, rest, other: rng.bytes(len(block[:16])) + block[16:] + rest,
    "write edge": lambda rng, block, rest, other: (
        (field := edge_field(rng, pick(rng, "<>") + pick(rng, "BHIQ"))) + (block + rest)[len(field) :]
    ),
    "truncate": lambda rng, block, rest, other: b"",
    "delete": lambda rng, block, rest, other: rest,
    "repeat": lambda rng, block, rest, other: block * int(2 ** rng.integers(1, 7)) + rest,
    "insert noise": lambda rng, block, rest, other: rng.bytes(int(2 ** rng.integers(12))) + block + rest,
    "insert run": lambda rng, block, rest, other: rng.bytes(1) * int(2 ** rng.integers(12)) + block + rest,
    "move": lambda rng, block, rest, other: rest[:4096] + block + rest[4096:],
    "splice": lambda rng, block, rest, other: other[int(rng.integers(len(other) + 1)) :],
}
