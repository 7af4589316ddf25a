"""Mutations of bytes, of JSON, and of files of parts, whose lengths and checksums are right again."""

import hashlib
import json
import pathlib
import struct
import tempfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

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


class Parts(NamedTuple):
    """A format whose files consist of parts: `split` and `join` are inverse; `mutate(rng, part)` changes a part."""

    split: Callable
    join: Callable
    mutate: Callable = blind

    def __call__(self, rng, data, other=b""):
        """Returns a file after mutations of its bytes, or with parts that are changed, removed or inserted."""
        if chance(rng, 0.2):
            return blind(rng, data, other)
        parts, count = self.split(data), pick(rng, (0, 1, 1, 2))
        for at in rng.permutation(len(parts))[:count]:
            parts[at] = self.mutate(rng, parts[at])
        if not count:
            at, new = int(rng.integers(len(parts))), pick(rng, self.split(other or data))
            parts[at : at + chance(rng, 0.3)] = pick(rng, ([], [new], [new, parts[at]]))
        return self.join(parts)


def frames(data, at, offset, code, extra):
    """Returns the parts of a file from `at` on; the length of a part, less `extra` bytes, is packed at `offset`."""
    found = []
    while at < len(data):
        found.append(data[at : at + struct.unpack_from(code, data, at + offset)[0] + extra])
        at += len(found[-1])
    return found


def _png_split(data):
    return [(frame[4:8], frame[8:-4]) for frame in frames(data, len(PNG_MAGIC), 0, ">I", 12)]


def _png_join(found):
    packed = (struct.pack(">I", len(content)) + kind + content for kind, content in found)
    return PNG_MAGIC + b"".join(chunk + struct.pack(">I", zlib.crc32(chunk[4:])) for chunk in packed)


def _png_chunk(rng, chunk):
    kind, content = chunk
    if chance(rng, 0.15):
        return pick(rng, (b"IDAT", b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"eXIf", b"fdAT", rng.bytes(4))), content
    if kind == b"IDAT" and chance(rng, 0.7):
        return kind, zlib.compress(blind(rng, zlib.decompress(content)), 1)
    return kind, blind(rng, content)


def _array_record_split(data):
    from array_record.python.array_record_module import ArrayRecordReader

    with tempfile.NamedTemporaryFile() as file:
        pathlib.Path(file.name).write_bytes(data)
        return ArrayRecordReader(file.name).read_all()


def _array_record_join(found):
    with tempfile.NamedTemporaryFile() as file:
        made.write_array_record(file.name, found)
        return pathlib.Path(file.name).read_bytes()


def _tensors_split(data):
    """Returns (name, description, bytes) of the entries of a safetensors file, the metadata included."""
    length = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, description in json.loads(data[8:length]).items():
        start, stop = description.get("data_offsets", (0, 0))
        found.append((name, description, data[length + start : length + stop]))
    return found


def _tensors_join(found):
    """Returns a safetensors file of these entries, with right offsets where the description is no hostile text."""
    entries, tensors = [], b""
    for name, description, content in found:
        if isinstance(description, dict):
            offsets = {"data_offsets": [len(tensors), len(tensors) + len(content)]}
            description = json.dumps(description | (offsets if "shape" in description else {})).encode()
        entries.append(json.dumps(name).encode() + b":" + description)
        tensors += content
    header = b"{" + b",".join(entries) + b"}"
    return struct.pack("<Q", len(header)) + header + tensors


def _tensor(rng, part):
    """Returns an entry of a safetensors file with another type, shape, name or contents, or with hostile JSON."""
    name, description, content = part
    if name == "__metadata__":  # the JSON of mixedres
        own = json_text(rng, description["mixedres"].encode()).decode(errors="surrogateescape")
        return name, description | {"mixedres": own}, content
    what, size = rng.random(), len(content)
    if what < 0.2:
        return name, json_text(rng, json.dumps(description).encode()), content
    if what < 0.3:
        return pick(rng, (f"{name}.1", "", "\x1b[31m\n", "module." + name)), description, content
    if what < 0.4:
        return name, description, blind(rng, content)
    kind, width = pick(rng, (("I8", 1), ("BOOL", 1), ("F16", 2), ("BF16", 2), ("F32", 4), ("I64", 8), ("F64", 8)))
    shape = pick(rng, ([size // width], [1, size // width], description["shape"][::-1], [], [1] * 70 + [size // width]))
    return name, description | {"dtype": kind, "shape": shape}, content


def checksums(files, step):
    """Returns the file of checksums that is right for these files of the checkpoint in the folder `step`."""
    covered = sorted(name for name in files if name.startswith(step) and files[name] is not None)
    sums = {name.removeprefix(step): hashlib.sha256(files[name]).hexdigest() for name in covered}
    return json.dumps({name: value for name, value in sums.items() if name != "checksums.json"}).encode()


PARTS = {
    "jpeg": Parts(lambda data: data.split(b"\xff"), b"\xff".join),  # at its markers
    "png": Parts(_png_split, _png_join, _png_chunk),
    "safetensors": Parts(_tensors_split, _tensors_join, _tensor),
    "tfrecord": Parts(
        lambda data: [frame[12:-4] for frame in frames(data, 0, 0, "<Q", 16)],
        lambda records: b"".join(map(made.framed, records)),
    ),
    "array_record": Parts(_array_record_split, _array_record_join),
}
