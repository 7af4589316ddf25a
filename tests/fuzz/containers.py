"""Files that consist of parts: mutations change parts or their list, and lengths and checksums are right again."""

import gzip
import json
import pathlib
import struct
import tempfile

import google_crc32c

from tests.fuzz import blind
from tests.fuzz.blind import chance, pick


def inside(split, join, mutate, new=None, *, outside=0.2):
    """Returns a mutation of files of one format.

    Args:
      split: contents of an intact file -> list of its parts.
      join: list of parts -> contents of a file whose lengths and checksums are right.
      mutate: (random numbers, intact part) -> a mutant of the part.
      new: random numbers -> a hostile part; None: only parts of the file are inserted.
      outside: share of mutants that are mutated as bytes, with lengths and checksums as they were.
    """

    def mutation(rng, data, other=b""):
        if chance(rng, outside):
            return blind.mutated(rng, data, other)
        return join(edited(rng, split(data), mutate, new))

    return mutation


def edited(rng, parts, mutate, new=None):
    """Returns the parts after mutations of up to three of them, a change of their list, or both."""
    parts, count = list(parts), pick(rng, (0, 1, 1, 1, 2, 3))
    for at in rng.permutation(len(parts))[:count]:
        parts[at] = mutate(rng, parts[at])
    if not parts or (count and chance(rng, 0.8)):
        return parts
    at, source = map(int, rng.integers(len(parts), size=2))
    what = pick(rng, ("remove", "copy", "swap", "insert"))
    if what == "remove":
        del parts[at]
    elif what == "swap":
        parts[at], parts[source] = parts[source], parts[at]
    else:
        parts.insert(at, new(rng) if new and what == "insert" else parts[source])
    return parts


def frames(data, at, offset, code, extra):
    """Yields the parts of a file that follow each other from `at` on.

    A part has a length at `offset`, packed by the `struct` code, and is that long and `extra` bytes longer.
    """
    while at < len(data):
        stop = at + struct.unpack_from(code, data, at + offset)[0] + extra
        yield data[at:stop]
        at = stop


def masked_crc(data):
    """Returns the CRC-32C of TFRecord files: rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """Returns the records of a TFRecord file."""
    return [frame[12:-4] for frame in frames(data, 0, 0, "<Q", 16)]


def join_records(found):
    """Returns a TFRecord file of these records, with right sums."""
    return b"".join(map(framed, found))


def framed(record, length=None):
    """Returns a record as TFRecord files hold it; `length`: eight bytes that claim another length, with their sum."""
    length = length or struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc(length)) + record + struct.pack("<I", masked_crc(record))


def read_array_record(data):
    """Returns the records of an ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordReader

    with tempfile.NamedTemporaryFile() as file:
        pathlib.Path(file.name).write_bytes(data)
        reader = ArrayRecordReader(file.name)
        found = reader.read_all()
        reader.close()
    return found


def join_array_record(found):
    """Returns an ArrayRecord file of these records, in one of three layouts."""
    from array_record.python.array_record_module import ArrayRecordWriter

    options = ("group_size:1", "group_size:1,uncompressed", "group_size:4")[len(b"".join(found)) % 3]
    with tempfile.NamedTemporaryFile() as file:
        writer = ArrayRecordWriter(file.name, options)
        for record in found:
            writer.write(record)
        writer.close()
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
    """Returns (header, contents) of the members of a packed tar file."""
    data, found, at = gzip.decompress(data), [], 0
    while data[at : at + 1].strip(b"\0"):
        size = int(data[at + 124 : at + 135], 8)
        found.append((data[at : at + 512], data[at + 512 : at + 512 + size]))
        at += 512 + -(-size // 512) * 512
    return found


def join_tar(found):
    """Returns a packed tar file of these members, whose headers have right sums."""
    tar = b""
    for header, content in found:
        total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
        tar += header[:148] + b"%06o\0 " % total + header[156:] + content + bytes(-len(content) % 512)
    return gzip.compress(tar + bytes(1024), 1, mtime=0)
