"""Mutations of the files of a checkpoint, with its checksums as they were or right for what the files became."""

import hashlib
import json

import numpy as np

from experiments.fuzzing import blind, hostile_json
from experiments.fuzzing.blind import chance, pick

CHECKSUMS = "default/checksums.json"
# What Orbax reads first, and its sums do not cover.
OUTSIDE = "_CHECKPOINT_METADATA"

Changes = dict[str, bytes | None]


def mutated(rng: np.random.Generator, files: dict[str, bytes]) -> Changes:
    """Other contents of one or two files by their names, None for a file that is gone.

    One in ten gets right checksums, so that the change reaches Orbax.
    """
    changes: Changes = {}
    if chance(rng, 0.1):
        return {CHECKSUMS: _sums(rng, files[CHECKSUMS], files)}
    covered = [name for name in sorted(files) if name != CHECKSUMS]
    heavy = ("default/_METADATA", "_sharding", "manifest.ocdbt", "process_0")
    weights = np.array([4.0 if name.endswith(heavy) else 1 for name in covered])
    for _ in range(1 + chance(rng, 0.2)):
        name = str(rng.choice(covered, p=weights / weights.sum()))
        changes[name] = _file(rng, files[name], files[pick(rng, covered)])
    if chance(rng, 0.1):
        changes[CHECKSUMS] = checksums(files | changes)
    return changes


def _file(rng: np.random.Generator, content: bytes, other: bytes) -> bytes | None:
    if chance(rng, 0.05):
        return None
    if chance(rng, 0.05):
        return other
    if content[:1] == b"{" and chance(rng, 0.8):
        return hostile_json.mutated(rng, content, other)
    return blind.mutated(rng, content, other)


def _sums(rng: np.random.Generator, content: bytes, files: dict[str, bytes]) -> bytes:
    """Hostile checksums, or names of other places."""
    if chance(rng, 0.6):
        return hostile_json.mutated(rng, content)
    sums = json.loads(content)
    name = pick(rng, ("../../../config.json", "/dev/null", ".", "", "a\0b", "\ud800", "x" * 5000, "d"))
    return json.dumps(sums | {name: hashlib.sha256(b"").hexdigest()}).encode()


def checksums(files: Changes) -> bytes:
    """The file of checksums that is right for these files of a checkpoint."""
    held = {name.removeprefix("default/"): content for name, content in files.items() if name.startswith("default/")}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(held.items()) if content is not None}
    sums.pop("checksums.json", None)
    return json.dumps(sums, indent=2).encode()
