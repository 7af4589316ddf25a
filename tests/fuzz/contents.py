"""Mutations of the parts of records, tensors, tar files and checkpoints."""

import hashlib
import json

from tests.data import made
from tests.fuzz import blind, hostile_json, images
from tests.fuzz.blind import chance, edge_field, pick

# The folder of a checkpoint that has checksums, and its file with the SHA-256 of the others.
STEP = "checkpoints/2/default/"
CHECKSUMS = STEP + "checksums.json"
# Bytes of the types of safetensors.
_BYTES = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3"), 1) | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
_BYTES |= dict.fromkeys(("F32", "I32", "U32"), 4) | dict.fromkeys(("F64", "I64", "U64", "C64"), 8)
# Values of a feature of a tf.train.Example.
_FEATURES = (
    {},
    *({"int64_list": {"value": value}} for value in ([-1], [3], [2**31], [2**63 - 1], [-(2**63)], [1, 2], [])),
    *({"bytes_list": {"value": [value]}} for value in (b"", b"\xff\xfe", b"two\nlines", b"\x1b[2J", b"x" * 100_000)),
    {"float_list": {"value": [float("nan"), float("inf")]}},
    {"bytes_list": {"value": [b"", b"\xff\n\x1b[31m"]}},
)


def record(rng, intact):
    """Returns a tf.train.Example with another feature or image, or after mutations of its bytes."""
    from tensorflow_datasets.proto import tf_example_pb2

    if chance(rng, 0.5):
        return blind.mutated(rng, intact)
    example = tf_example_pb2.Example.FromString(intact)
    name = pick(rng, sorted(example.features.feature))
    feature = example.features.feature[name]
    if name in ("image", "image/encoded") and chance(rng, 0.5):
        feature.bytes_list.value[:] = [images.JPEG.mutated(rng, *2 * feature.bytes_list.value[:1])]
    elif chance(rng, 0.1):
        del example.features.feature[name]
    else:
        feature.CopyFrom(type(feature)(**pick(rng, _FEATURES)))
    return example.SerializeToString()


def framed_record(rng, intact):
    """Returns a mutant of a record of a TFRecord file; in one of ten cases its length is a lie."""
    return made.framed(record(rng, intact[12:-4]), edge_field(rng, "<Q") if chance(rng, 0.1) else None)


def tensor(rng, part):
    """Returns an entry of a safetensors file with another type, shape, name or contents, or with hostile JSON."""
    name, description, content = part
    if name == "__metadata__":  # the JSON of mixedres
        own = hostile_json.mutated(rng, description["mixedres"].encode())
        return name, description | {"mixedres": own.decode(errors="surrogateescape")}, content
    what = rng.random()
    if what < 0.2:
        return name, hostile_json.mutated(rng, json.dumps(description).encode()), content
    if what < 0.3:
        return pick(rng, (f"{name}.1", "", "\x1b[31m\n", "module." + name)), description, content
    if what < 0.4:
        return name, description, blind.mutated(rng, content)
    kind = pick(rng, [kind for kind, size in _BYTES.items() if len(content) % size == 0])
    length = len(content) // _BYTES[kind]
    shapes = [[length], [1, length], [length, 1, 1, 1], description["shape"][::-1], [], [1] * 70 + [length]]
    return name, description | {"dtype": kind, "shape": pick(rng, shapes)}, content


def checkpoint(rng, files):
    """Returns changes of a few files of a checkpoint: {name: contents, or None for a file that is gone}.

    One in ten mutants has right checksums, so that the change reaches Orbax; in another the checksums alone change.
    Nothing reads the files of success.
    """
    what = rng.random()
    if what < 0.1:
        return {CHECKSUMS: hostile_json.mutated(rng, files[CHECKSUMS])}
    covered = sorted(name for name in files if name != CHECKSUMS and not name.endswith("success.txt"))
    changes = {}
    for _ in range(1 + chance(rng, 0.2)):
        name, other = pick(rng, covered), files[pick(rng, covered)]
        is_json = files[name][:1] == b"{" and chance(rng, 0.8)
        mutant = (hostile_json if is_json else blind).mutated(rng, files[name], other)
        changes[name] = pick(rng, (None, other)) if chance(rng, 0.1) else mutant
    return changes | ({CHECKSUMS: checksums(files | changes)} if what < 0.2 else {})


def checksums(files, step=STEP):
    """Returns the file of checksums that is right for these files of a checkpoint in the folder `step`."""
    own = f"{step}checksums.json"
    covered = sorted(name for name in files if name.startswith(step) and name != own and files[name] is not None)
    return json.dumps({name.removeprefix(step): hashlib.sha256(files[name]).hexdigest() for name in covered}).encode()
