"""Mutations of bytes, of JSON, and of a part of a file, whose lengths and checksums are right again."""

import hashlib
import json
import struct
import zlib

import numpy as np

from tests.data import made

EDGES = (0, 1, 127, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# Values as they are written in a file of JSON; Python's reader takes NaN and Infinity, too.
LITERALS = (
    *('""', '"."', '"-1"', '"nan"', '"%s%n{0}"', '"/dev/null"', '"../../../config.json"', '"fp16"', '"resnet50"'),
    *(r'"a\u0000b"', r'"\u001b[31mred"', r'"\udfff\ud800"', r'"two\nlines"', r'"\r\u2028\u0085"', f'"{"x" * 100_000}"'),
    *("null", "true", "false", "0", "-1", "1", "2", "-0.0", "1.5", "1e308", "1e999", "-1e999", "NaN", "Infinity"),
    *("2147483648", "9223372036854775808", "18446744073709551616", "1" + "0" * 400, "1" + "0" * 5000),
    *("[]", "{}", "[null]", '["a", 1]', "[0, 0]", "[1, 2, 3, 4, 5]", '{"a": 1, "a": {}}', '{"": null}'),
    *("[" * depth + "]" * depth for depth in (50, 990, 100_000)),
    *('{"a":' * 100_000 + "0" + "}" * 100_000, "[" * 5000),
)
_PLACE = "\x01place\x01"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def generator(seed, name, number):
    """Returns the random numbers of one mutant: a function of the seed, the format's name and the mutant's number."""
    return np.random.default_rng([seed, *name.encode(), number])


def chance(rng, probability):
    return bool(rng.random() < probability)


def pick(rng, choices):
    """Returns one element of a sequence, with its type unchanged."""
    return choices[int(rng.integers(len(choices)))]


def blind(rng, data, other=b""):
    """Returns bytes after one or two mutations that know no format; `other` is a file to copy a block from."""
    for _ in range(1 + chance(rng, 0.3)):
        start = int(rng.integers(1 + min(len(data), pick(rng, (64, len(data), len(data))))))
        block, rest = np.split(np.frombuffer(data[start:], np.uint8), [int(rng.integers(1, 256))])
        block, rest, size = block.tobytes(), rest.tobytes(), int(2 ** rng.integers(12))
        code = pick(rng, "<>") + pick(rng, "BHIQ")
        edge = struct.pack(code, pick(rng, EDGES) % 2 ** (8 * struct.calcsize(code)))
        changed = pick(
            rng,
            (
                bytes([block[0] ^ 1 << int(rng.integers(8))]) + block[1:] + rest if block else b"\0",  # one bit
                edge + (block + rest)[len(edge) :],
                b"",  # cut off
                rest,
                block * int(2 ** rng.integers(1, 7)) + rest,
                rng.bytes(size) + block + rest,
                rng.bytes(1) * size + block + rest,
                rest[:4096] + block + rest[4096:],
                (other or data[::-1])[int(rng.integers(len(other) + 1)) :],
            ),
        )
        data = (data[:start] + changed)[:4_000_000]
    return data


def json_text(rng, data, other=b""):
    """Returns a JSON document with one or two hostile changes; one in eight after mutations of its bytes, too."""
    for _ in range(1 + chance(rng, 0.2)):
        try:
            data = changed_json(rng, json.loads(data))
        except (ValueError, RecursionError):
            return blind(rng, data, other)
    if chance(rng, 0.06):
        data = data.decode().encode(pick(rng, ("utf-16", "utf-8-sig", "utf-32")))
    return blind(rng, data, other) if chance(rng, 0.125) else data


def _places(holder):
    """Yields (dictionary or list, key or index) of every value inside a document."""
    if isinstance(holder, dict | list):
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            yield from _places(holder[key])


def changed_json(rng, tree):
    """Returns the document with one value replaced, removed, doubled, renamed or overwritten by another value."""
    root = [tree]
    holder, key = pick(rng, places := list(_places(root)))
    what = pick(rng, (*["literal"] * 6, "remove", "double", "rename", "other"))
    literal, held = pick(rng, LITERALS), json.dumps(holder[key])
    if what == "remove":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        holder[pick(rng, ("", "..", "a\0b", "\x1b[31m", "two\nlines", "x" * 100_000))] = holder.pop(key)
    else:
        if what == "double":
            literal = f"{held}, {json.dumps(key)}: {literal}" if isinstance(holder, dict) else f"{held}, {literal}"
        elif what == "other":
            source, name = pick(rng, places)
            literal = json.dumps(source[name])
        holder[key] = _PLACE
    return json.dumps(root)[1:-1].replace(json.dumps(_PLACE), literal).encode()


def in_parts(rng, kind, data):
    """Returns a file with a part that is changed, removed or doubled; one in five after mutations of its bytes."""
    if chance(rng, 0.2):
        return blind(rng, data)
    split, join = PARTS[kind]
    parts = split(data)
    at = int(rng.integers(len(parts)))
    changed = (json_text if parts[at][:1] == b"{" else blind)(rng, parts[at])
    parts[at : at + 1] = pick(rng, ([changed], [changed], [changed], [], [parts[at], changed]))
    return join(parts)


def frames(data, at, offset, code, extra):
    """Returns the parts of a file from `at` on; the length of a part, less `extra` bytes, is packed at `offset`."""
    found = []
    while at < len(data):
        found.append(data[at : at + struct.unpack_from(code, data, at + offset)[0] + extra])
        at += len(found[-1])
    return found


def _png_join(chunks):
    """Returns a PNG of chunks, each a kind of four bytes and what it has."""
    framed = (struct.pack(">I", max(0, len(chunk) - 4)) + chunk for chunk in chunks)
    return PNG_MAGIC + b"".join(chunk + struct.pack(">I", zlib.crc32(chunk[4:])) for chunk in framed)


def _tensors_split(data):
    """Returns the metadata of mixedres, the header without them, and the tensors of a safetensors file."""
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    own, header["__metadata__"]["mixedres"] = header["__metadata__"]["mixedres"], _PLACE
    return [own.encode(), json.dumps(header).encode(), data[length:]]


def _tensors_join(parts):
    own, header, tensors = [*parts, b"", b""][:3]
    own = json.dumps(own.decode(errors="surrogateescape"))
    header = header.replace(json.dumps(_PLACE).encode(), own.encode())
    return struct.pack("<Q", len(header)) + header + tensors


def checksums(files, step):
    """Returns the file of checksums that is right for these files of the checkpoint in the folder `step`."""
    covered = sorted(name for name in files if name.startswith(step) and files[name] is not None)
    sums = {name.removeprefix(step): hashlib.sha256(files[name]).hexdigest() for name in covered}
    return json.dumps({name: value for name, value in sums.items() if name != "checksums.json"}).encode()


# Formats whose files consist of parts with lengths and checksums: split and join, which are inverse.
PARTS = {
    "png": (lambda data: [frame[4:-4] for frame in frames(data, len(PNG_MAGIC), 0, ">I", 12)], _png_join),
    "safetensors": (_tensors_split, _tensors_join),
    "tfrecord": (
        lambda data: [frame[12:-4] for frame in frames(data, 0, 0, "<Q", 16)],
        lambda records: b"".join(map(made.framed, records)),
    ),
}
