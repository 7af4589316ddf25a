"""Mutations of PNG and JPEG that keep what a decoder checks first: sums of chunks, lengths of segments."""

import struct
import zlib

from tests.fuzz import blind
from tests.fuzz.blind import chance, pick
from tests.fuzz.containers import Container, frames

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Fields of headers: bits, types of color and components; sides that are none, small, at the limits and beyond them.
_FIELDS = (0, 1, 2, 3, 4, 5, 6, 8, 16, 63, 255, 1000, 13_377, 13_378, 65_535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_KINDS = (
    b"IHDR",
    b"IDAT",
    b"tRNS",
    b"PLTE",
    b"iCCP",
    b"zTXt",
    b"iTXt",
    b"eXIf",
    b"gAMA",
    b"acTL",
    b"fcTL",
    b"fdAT",
    b"IEND",
)
_SCAN, _FRAMES = 0xDA, (0xC0, 0xC1, 0xC2)


def with_other_field(rng, data, code):
    """Returns packed unsigned integers, of a big-endian `struct` code, of which one or two are hostile."""
    fields = list(struct.unpack(code, data))
    for _ in range(1 + chance(rng, 0.3)):
        at = int(rng.integers(len(fields)))
        fields[at] = pick(rng, _FIELDS) % 2 ** (8 * struct.calcsize(code[1 + at]))
    return struct.pack(code, *fields)


def chunks(data):
    """Returns the (kind, content) of the chunks of a PNG file."""
    return [(frame[4:8], frame[8:-4]) for frame in frames(data, len(PNG_MAGIC), 0, ">I", 12)]


def join_chunks(found):
    """Returns a PNG file of these chunks, whose sums are right."""
    return PNG_MAGIC + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in found
    )


def _chunk(rng, chunk):
    """Returns a chunk of another kind, with hostile fields of the header, other pixels or other bytes."""
    kind, content = chunk
    if chance(rng, 0.15):
        return pick(rng, (*_KINDS, rng.bytes(4))), content
    if kind == b"IHDR":
        return kind, with_other_field(rng, content, ">IIBBBBB")
    if kind == b"IDAT" and chance(rng, 0.7):
        return kind, zlib.compress(blind.mutated(rng, zlib.decompress(content)), 1)
    return kind, blind.mutated(rng, content)


def segments(data):
    """Returns the (marker, content) of a JPEG file; the first scan is the last, with all that follows."""
    scan = data.index(bytes((0xFF, _SCAN)))
    found = [(frame[1], frame[4:]) for frame in frames(data[:scan], 2, 2, ">H", 2)]
    return [*found, (_SCAN, data[scan + 2 :])]


def join_segments(found):
    """Returns a JPEG file of these segments, whose lengths are right; the contents of a scan begin with its length."""
    data = b"\xff\xd8"
    for marker, content in found:
        cut = content[:65_533]
        data += bytes((0xFF, marker)) + (content if marker == _SCAN else struct.pack(">H", len(cut) + 2) + cut)
    return data


def _segment(rng, segment):
    """Returns a segment with another marker, a hostile frame header, a marker inside the scan or other bytes."""
    marker, content = segment
    if chance(rng, 0.1):
        return pick(rng, (0xC0, 0xC2, 0xC9, int(rng.integers(0xC0, 0x100)))), content
    if marker in _FRAMES:
        return marker, with_other_field(rng, content, ">BHH" + "B" * (len(content) - 5))
    if marker == _SCAN and chance(rng, 0.3):
        at = int(rng.integers(len(content)))
        return marker, content[:at] + bytes((0xFF, int(rng.integers(0xC0, 0x100)))) + content[at:]
    return marker, blind.mutated(rng, content)


PNG = Container(chunks, join_chunks, _chunk)
JPEG = Container(segments, join_segments, _segment)
