"""Tests; the tree mirrors that of the library."""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
