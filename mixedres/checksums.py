"""SHA-256 sums of the files of a directory, kept beside them, by which damage is known before anything is read."""

from __future__ import annotations

import hashlib
import json
import pathlib

from mixedres.files import write_json

CHECKSUMS = "checksums.json"


def write_checksums(directory: pathlib.Path) -> None:
    """Writes the sum of every file below `directory` into its ``checksums.json``."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    write_json(directory / CHECKSUMS, {name: _sha256(directory / name) for name in names})


def checksums_hold(directory: pathlib.Path) -> bool:
    """Whether every file is there and has the sum it was written with; False where no sums are."""
    try:
        expected = json.loads((directory / CHECKSUMS).read_text())
        return bool(expected) and all(_sha256(directory / name) == digest for name, digest in expected.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
