"""Where the tests of a hostile world work."""

import pytest


@pytest.fixture
def place(tmp_path):
    """An empty directory."""
    return tmp_path
