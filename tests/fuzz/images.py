"""Mutations of PNG and JPEG that keep what a decoder checks first: sums of chunks, lengths of segments."""

import struct
import zlib

from tests.fuzz import blind
from tests.fuzz.blind import chance, edge_field, pick

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Sides of images: none, small, at the limits of pixels, and beyond every limit.
_SIDES = (0, 1, 3, 4, 5, 63, 1000, 13_377, 13_378, 65_535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_NEW_CHUNKS = (
    b"tRNS",
    b"PLTE",
    b"iCCP",
    b"zTXt",
    b"iTXt",
    b"tEXt",
    b"eXIf",
    b"gAMA",
    b"acTL",
    b"fcTL",
    b"fdAT",
    b"IEND",
)
_BOMB = zlib.compress(bytes(20_000_000), 9)


def chunks(data):
    """The (kind, content) of the chunks of a PNG file."""
    found, at = [], len(PNG_MAGIC)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def join_chunks(found):
    """A PNG file of these chunks, whose sums are right."""
    return PNG_MAGIC + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in found
    )


def png(rng, data, other=b""):
    """A PNG file after mutations: four in five keep the sums of its chunks right."""
    if chance(rng, 0.2):
        return blind.mutated(rng, data, other)
    found = chunks(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(found))) if found else 0
        what = rng.integers(8)
        if not found:
            break
        kind, content = found[at]
        if what == 0:
            found[0] = (b"IHDR", _png_header(rng, found[0][1]))
        elif what == 1:
            found[at] = (kind, blind.mutated(rng, content, other))
        elif what == 2:
            found.pop(at)
        elif what == 3:
            found.insert(at, found[int(rng.integers(len(found)))])
        elif what == 4:
            found.insert(at, (pick(rng, _NEW_CHUNKS), _chunk_content(rng)))
        elif what == 5:
            found[at] = (pick(rng, (*_NEW_CHUNKS, b"IDAT", b"IHDR", rng.bytes(4))), content)
        else:
            found = _other_pixels(rng, found)
    joined = join_chunks(found)
    return blind.write_edge(rng, joined, b"") if chance(rng, 0.05) else joined


def _png_header(rng, content):
    width, height, *rest = struct.unpack(">IIBBBBB", content) if len(content) == 13 else (8, 8, 8, 2, 0, 0, 0)
    if chance(rng, 0.5):
        width = pick(rng, _SIDES)
    if chance(rng, 0.5):
        height = pick(rng, _SIDES)
    if chance(rng, 0.6):
        rest[int(rng.integers(5))] = pick(rng, (0, 1, 2, 3, 4, 6, 8, 16, 255))
    return struct.pack(">IIBBBBB", width, height, *rest)


def _chunk_content(rng):
    name = pick(rng, (b"XML:com.adobe.xmp\0\0\0\0\0", b"Comment\0\0", b"icc\0\0", b"Raw profile type exif\0\0", b""))
    body = pick(rng, (rng.bytes(int(rng.integers(64))), zlib.compress(rng.bytes(40)), _BOMB, tiff(rng)))
    return name + body


def _other_pixels(rng, found):
    """Mutates the rows of pixels before they are compressed."""
    packed = b"".join(content for kind, content in found if kind == b"IDAT")
    try:
        rows = zlib.decompressobj().decompress(packed, 2_000_000)
    except zlib.error:
        return found
    idat = (b"IDAT", zlib.compress(blind.mutated(rng, rows), 1))
    others = [(kind, content) for kind, content in found if kind != b"IDAT"]
    return [*others[:-1], idat, *others[-1:]]


def segments(data):
    """The (marker, content) of a JPEG file up to the first scan, and all that follows from its marker on."""
    found, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((data[at + 1], data[at + 4 : at + 2 + length]))
        at += 2 + length
    return found, data[at:]


def join_segments(found, scan):
    """A JPEG file of these segments, whose lengths are right."""
    head = b"".join(
        bytes((0xFF, marker)) + struct.pack(">H", len(content[:65_533]) + 2) + content[:65_533]
        for marker, content in found
    )
    return b"\xff\xd8" + head + scan


def jpeg(rng, data, other=b""):
    """A JPEG file after mutations: four in five know its segments."""
    if chance(rng, 0.2):
        return blind.mutated(rng, data, other)
    found, scan = segments(data)
    for _ in range(int(rng.integers(1, 4))):
        if not found:
            break
        at, what = int(rng.integers(len(found))), rng.integers(8)
        marker, content = found[at]
        if what == 0:
            frames = [place for place, (kind, _) in enumerate(found) if kind in (0xC0, 0xC1, 0xC2)]
            found[frames[0] if frames else at] = _frame(rng, found[frames[0] if frames else at])
        elif what == 1:
            found[at] = (marker, blind.mutated(rng, content, other))
        elif what == 2:
            found.pop(at)
        elif what == 3:
            found.insert(at, found[int(rng.integers(len(found)))])
        elif what == 4:
            found.insert(at, _application(rng))
        elif what == 5:
            found[at] = (int(rng.integers(0xC0, 0x100)), content)
        elif what == 6:
            scan = blind.mutated(rng, scan, other)
        else:  # markers inside the scan: restarts, a second image, its end
            start = int(rng.integers(len(scan) + 1))
            scan = scan[:start] + bytes((0xFF, int(rng.integers(0xC0, 0x100)))) + scan[start:]
    joined = join_segments(found, scan)
    return blind.write_edge(rng, joined, b"") if chance(rng, 0.05) else joined


def _frame(rng, segment):
    """A frame header with other sides, precision, samplings or number of components."""
    marker, content = segment[0], bytearray(segment[1].ljust(15, b"\1"))
    what = rng.integers(4)
    if what == 0:
        content[1:5] = struct.pack(">HH", pick(rng, _SIDES) % 65_536, pick(rng, _SIDES) % 65_536)
    elif what == 1:
        content[0] = pick(rng, (0, 1, 8, 12, 16, 255))
    elif what == 2:
        content[5] = pick(rng, (0, 1, 2, 3, 4, 5, 255))
    else:
        content[7 + 3 * int(rng.integers(3)) - 1 + int(rng.integers(3))] = int(rng.integers(256))
    return pick(rng, (marker, marker, 0xC0, 0xC2, 0xC9)), bytes(content)


def _application(rng):
    exif = (0xE1, b"Exif\0\0" + tiff(rng))
    adobe = (0xEE, b"Adobe\0\x64\0\0\0\0" + bytes((int(rng.integers(4)),)))
    profile = (0xE2, b"ICC_PROFILE\0" + bytes(rng.integers(0, 4, 2).tolist()) + rng.bytes(40))
    several = (0xE2, b"MPF\0" + tiff(rng))
    restarts = (0xDD, edge_field(rng, ">H"))
    xmp = (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<x " * int(rng.integers(200)))
    return pick(rng, (exif, exif, exif, adobe, profile, several, restarts, xmp))


def tiff(rng):
    """EXIF data: an orientation and other fields, of hostile types, counts and offsets."""
    order = pick(rng, "<>")
    fields = []
    for tag in (0x0112, 0x8769, 0x8825, 0x010F)[: int(rng.integers(1, 5))]:
        kind, count = pick(rng, (3, 3, 3, 4, 2, 5, 7, 12, 13, 0, 255)), pick(rng, (1, 1, 1, 0, 2, 65_535, 2**32 - 1))
        value = pick(rng, (struct.pack(order + "HH", int(rng.integers(10)), 0), edge_field(rng, order + "I")))
        fields.append(struct.pack(order + "HHI", tag, kind, count) + value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", pick(rng, (8, 8, 8, 8, 0, 2**31)))
    following = struct.pack(order + "I", pick(rng, (0, 0, 8)))
    data = head + struct.pack(order + "H", len(fields)) + b"".join(fields) + following + rng.bytes(8)
    return blind.mutated(rng, data) if chance(rng, 0.3) else data
