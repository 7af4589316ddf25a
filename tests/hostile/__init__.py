"""An adversary's findings, each of which stays mended."""

import pytest

pytest.register_assert_rewrite("tests.hostile.places", "tests.hostile.files", "tests.hostile.table")
