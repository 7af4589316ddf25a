"""Files that consist of parts: mutations change parts or their list, and lengths and checksums are right again."""

import gzip
import json
import pathlib
import struct
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from tests.data import made
from tests.fuzz import blind
from tests.fuzz.blind import chance, pick


class Container(NamedTuple):
    """A format whose files consist of parts.

    Attributes:
      split: contents of an intact file -> list of its parts.
      join: list of parts -> contents of a file whose lengths and checksums are right.
      mutate: (random numbers, intact part) -> a mutant of the part.
      outside: share of mutants that are mutated as bytes, with lengths and checksums as they were.
    """

    split: Callable
    join: Callable
    mutate: Callable
    outside: float = 0.2

    def mutated(self, rng, data, other):
        """Returns a file after mutations of up to three parts, a change of the list of parts, or both.

        Parts and blocks of another file are inserted.
        """
        if chance(rng, self.outside):
            return blind.mutated(rng, data, other)
        parts, count = self.split(data), pick(rng, (0, 1, 1, 1, 2, 3))
        for at in rng.permutation(len(parts))[:count]:
            parts[at] = self.mutate(rng, parts[at])
        if not count or chance(rng, 0.3):
            at, new = int(rng.integers(len(parts))), pick(rng, self.split(other))
            if chance(rng, 0.3):
                del parts[at]
            else:
                parts.insert(at, new if chance(rng, 0.5) else self.mutate(rng, new))
        return self.join(parts)


def frames(data, at, offset, code, extra):
    """Returns the parts of a file from `at` on; the length of a part, less `extra` bytes, is packed at `offset`."""
    found = []
    while at < len(data):
        found.append(data[at : at + struct.unpack_from(code, data, at + offset)[0] + extra])
        at += len(found[-1])
    return found


def split_array_record(data):
    """Returns the records of an ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordReader

    with tempfile.NamedTemporaryFile() as file:
        pathlib.Path(file.name).write_bytes(data)
        return ArrayRecordReader(file.name).read_all()


def join_array_record(found):
    """Returns an ArrayRecord file of these records, in one of three layouts."""
    options = ("group_size:1", "group_size:1,uncompressed", "group_size:4")[len(b"".join(found)) % 3]
    with tempfile.NamedTemporaryFile() as file:
        made.write_array_record(file.name, found, options)
        return pathlib.Path(file.name).read_bytes()


def split_tensors(data):
    """Returns (name, description, bytes) of the entries of a safetensors file, the metadata included."""
    length = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, description in json.loads(data[8:length]).items():
        start, stop = description.get("data_offsets", (0, 0))
        found.append((name, description, data[length + start : length + stop]))
    return found


def join_tensors(found):
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


def split_tar(data):
    """Returns the members of a packed tar file, each a header of 512 bytes and contents."""
    tar, found, at = gzip.decompress(data), [], 0
    while tar[at : at + 512].strip(b"\0"):
        stop = at + 512 + int(tar[at + 124 : at + 135], 8)
        found.append(tar[at:stop])
        at = stop + -stop % 512
    return found


def join_tar(found):
    """Returns a packed tar file of these members, with right sizes and sums."""
    tar = b""
    for member in found:
        member = member.ljust(512, b"\0")
        head = member[:124] + b"%011o\0" % (len(member) - 512) + member[136:148]
        total = sum(head) + 8 * ord(" ") + sum(member[156:512])
        tar += head + b"%06o\0 " % total + member[156:] + bytes(-len(member) % 512)
    return gzip.compress(tar + bytes(1024), 1, mtime=0)
