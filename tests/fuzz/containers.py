"""Mutations of safetensors, TFRecord, ArrayRecord, CIFAR archives and checkpoints from the inside.

Lengths and checksums around what changes are right again, or they are not.
"""

import gzip
import hashlib
import io
import json
import struct
import tarfile

import google_crc32c
import numpy as np

from tests.fuzz import blind, hostile_json, images
from tests.fuzz.blind import chance, edge_field, pick

# The file of a checkpoint with the SHA-256 of the others.
CHECKSUMS = "default/checksums.json"
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "F8_E4M3", "C64")
_BYTES = dict(zip(_DTYPES, (8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1, 1, 8), strict=True))


def safetensors(rng, data, other=b""):
    """A safetensors file after mutations: most of its header, whose length is right."""
    if chance(rng, 0.2):
        return blind.mutated(rng, data, other)
    length = int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    what = rng.integers(6)
    if what == 0:
        text = hostile_json.mutated(rng, json.dumps(header).encode(), other[8:4096])
    elif what == 1:
        text = _metadata(rng, header)
    else:
        for _ in range(int(rng.integers(1, 4))):
            _change_tensor(rng, header)
        text = json.dumps(header).encode()
    if chance(rng, 0.1):
        tensors = blind.mutated(rng, tensors, other)
    return struct.pack("<Q", len(text)) + text + tensors


def _metadata(rng, header):
    """Changes what is recorded beside the tensors: mixedres' own JSON, or the whole of the metadata."""
    about = header.setdefault("__metadata__", {})
    if "mixedres" in about and chance(rng, 0.8):
        about["mixedres"] = hostile_json.mutated(rng, about["mixedres"].encode()).decode(errors="surrogateescape")
        return json.dumps(header).encode(errors="surrogateescape")
    path = pick(rng, list(hostile_json.paths(about)))
    return hostile_json.literal_in(rng, header, ("__metadata__", *path))


def _change_tensor(rng, header):
    """One tensor of another dtype, shape, place or name, or gone; half of these keep its number of bytes."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return
    name = pick(rng, names)
    tensor = header[name]
    what = rng.integers(8)
    if what < 4:  # the same bytes read otherwise
        count = tensor["data_offsets"][1] - tensor["data_offsets"][0]
        tensor["dtype"] = pick(rng, [kind for kind in _DTYPES if count % _BYTES[kind] == 0])
        length = count // _BYTES[tensor["dtype"]]
        shapes = [[length], [1, length], [length, 1, 1, 1], tensor["shape"][::-1], [], [1] * 70 + [length]]
        tensor["shape"] = pick(rng, shapes)
    elif what == 4:
        tensor["dtype"] = pick(rng, (*_DTYPES, "F4", "F6_E2M3", "f32", ""))
    elif what == 5:
        shape = tensor["shape"] or [1]
        shape[int(rng.integers(len(shape)))] = pick(rng, (0, -1, 1, *blind.EDGES))
        tensor["shape"] = shape
    elif what == 6:
        tensor["data_offsets"][int(rng.integers(2))] = pick(rng, blind.EDGES)
    elif chance(rng, 0.5):
        header[pick(rng, (f"{name}.1", "", "\x1b[31m\n", "module." + name, pick(rng, names)))] = header.pop(name)
    else:
        header.pop(name)


def masked_crc(data):
    """Returns the CRC-32C of TFRecord files: rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """The records of a TFRecord file."""
    found, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    return found


def join_records(found):
    """A TFRecord file of these records, whose sums are right."""
    return b"".join(map(framed, found))


def framed(record, length=None):
    """A record as TFRecord files hold it; `length`: eight bytes that claim another one."""
    length = length or struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked_crc(length)) + record + struct.pack("<I", masked_crc(record))


def tfrecord(rng, data, other=b""):
    """A TFRecord file after mutations: three in four keep its sums right."""
    if chance(rng, 0.25):
        return blind.mutated(rng, data, other)
    found = _other_records(rng, records(data))
    if not chance(rng, 0.1) or not found:
        return join_records(found)
    at = int(rng.integers(len(found)))  # a length that is a lie, with the sum of the lie
    lie = framed(found[at], edge_field(rng, "<Q"))
    return join_records(found[:at]) + lie + join_records(found[at + 1 :])


def array_record(rng, data, other, scratch):
    """An ArrayRecord file after mutations of its bytes, or written anew with other records from TFRecord's `other`."""
    if chance(rng, 0.5):
        return blind.mutated(rng, data)
    from array_record.python.array_record_module import ArrayRecordWriter

    path = scratch / "new.array_record"
    writer = ArrayRecordWriter(str(path), pick(rng, ("group_size:1", "group_size:1,uncompressed", "group_size:4")))
    for record in _other_records(rng, records(other)):
        writer.write(record)
    writer.close()
    return path.read_bytes()


def _other_records(rng, found):
    """Records of which one is another message, or that are more or fewer."""
    at, what = int(rng.integers(len(found))), rng.integers(10)
    if what < 4:
        found[at] = _example(rng, found[at])
    elif what < 8:
        found[at] = blind.mutated(rng, found[at], found[0])
    elif what == 8:
        found.pop(at)
    else:
        found.insert(at, found[at])
    return found


def _example(rng, record):
    """A tf.train.Example with a feature of another type, length or content."""
    from tensorflow_datasets.proto import tf_example_pb2

    example = tf_example_pb2.Example.FromString(record)
    features = example.features.feature
    name = pick(rng, ("image", "label", "file_name"))
    what = rng.integers(7)
    if what == 0:
        features.pop(name)
    elif what == 1:
        features[name].bytes_list.value.extend([b"", b"\xff\n\x1b[31m"][: int(rng.integers(1, 3))])
    elif what == 2:
        features[name].float_list.value.extend([float("nan"), float("inf")])
    elif what == 3:
        features[name].Clear()
    elif what == 4:
        features["label"].int64_list.value[:] = [pick(rng, (-1, 3, 2**31, 2**63 - 1, -(2**63)))]
    elif what == 5:
        features["file_name"].bytes_list.value[:] = [
            pick(rng, (b"\xff\xfe", b"two\nlines", b"\x1b[2J", b"x" * 100_000))
        ]
    else:
        features["image"].bytes_list.value[:] = [images.jpeg(rng, features["image"].bytes_list.value[0])]
    return example.SerializeToString()


def cifar(rng, data, other=b""):
    """Returns a CIFAR archive after mutations of it, of the tar in it, or of a file in the tar."""
    what = rng.random()
    if what < 0.15:
        return blind.mutated(rng, data, other)
    if what < 0.153:  # two gigabytes and more, when it is unpacked
        return data + gzip.compress(bytes(2**26), 9, mtime=0) * int(rng.integers(33, 50))
    tar = gzip.decompress(data)
    return gzip.compress(_tar_headers(rng, tar) if what < 0.4 else _other_member(rng, tar), 1, mtime=0)


def _tar_headers(rng, tar):
    """Returns a tar with another field in a header, most often with the right sum of the header."""
    changed = bytearray(tar)
    at = pick(rng, [place for place in range(0, len(tar), 512) if tar[place + 257 : place + 262] == b"ustar"])
    start, stop = pick(rng, ((0, 100), (100, 108), (124, 136), (136, 148), (156, 157), (157, 257), (345, 500)))
    fields = (rng.bytes(12), b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-1\0", b"x", b"L", b"S", b"5")
    field = pick(rng, fields)[: stop - start].ljust(min(stop - start, 12), b"\0")
    changed[at + start : at + start + len(field)] = field
    if chance(rng, 0.7):
        changed[at + 148 : at + 156] = b" " * 8
        changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    return bytes(changed) if chance(rng, 0.8) else blind.mutated(rng, bytes(changed))


def _other_member(rng, tar):
    """Returns the tar with one file mutated; another may be left out."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        held = {member.name: opened.extractfile(member).read() for member in opened if member.isfile()}
    name = pick(rng, sorted(held))
    held[name] = blind.mutated(rng, held[name])
    if chance(rng, 0.05):
        held.pop(pick(rng, sorted(held)))
    return make_tar(held)


def make_tar(held):
    """A tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as opened:
        for name, content in held.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def checkpoint(rng, files):
    """Returns other contents of one or two files by their names, None for a file that is gone.

    One in ten gets right checksums, so that the change reaches Orbax.
    """
    if chance(rng, 0.1):
        return {CHECKSUMS: _sums(rng, files[CHECKSUMS])}
    changes = {}
    covered = [name for name in sorted(files) if name != CHECKSUMS]
    heavy = ("default/_METADATA", "_sharding", "manifest.ocdbt", "process_0")
    weights = np.array([4.0 if name.endswith(heavy) else 1 for name in covered])
    for _ in range(1 + chance(rng, 0.2)):
        name = str(rng.choice(covered, p=weights / weights.sum()))
        changes[name] = _file(rng, files[name], files[pick(rng, covered)])
    if chance(rng, 0.1):
        changes[CHECKSUMS] = checksums(files | changes)
    return changes


def _file(rng, content, other):
    if chance(rng, 0.05):
        return None
    if chance(rng, 0.05):
        return other
    if content[:1] == b"{" and chance(rng, 0.8):
        return hostile_json.mutated(rng, content, other)
    return blind.mutated(rng, content, other)


def _sums(rng, content):
    """Returns hostile checksums, or checksums with a name of another place."""
    if chance(rng, 0.6):
        return hostile_json.mutated(rng, content)
    name = pick(rng, ("../../../config.json", "/dev/null", ".", "", "a\0b", "\ud800", "x" * 5000, "d"))
    return json.dumps(json.loads(content) | {name: hashlib.sha256(b"").hexdigest()}).encode()


def checksums(files):
    """Returns the file of checksums that is right for these files of a checkpoint."""
    held = {name.removeprefix("default/"): content for name, content in files.items() if name.startswith("default/")}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(held.items()) if content is not None}
    sums.pop("checksums.json", None)
    return json.dumps(sums, indent=2).encode()
